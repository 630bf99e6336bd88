"""Which backend runs a call, and with which configuration, by the problem and the machine."""
