"""Engines in C++, called by XLA through its FFI."""
