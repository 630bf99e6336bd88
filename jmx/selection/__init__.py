"""Which backend runs a call: the problem, the machine, the choice, and the configuration of what is chosen."""
