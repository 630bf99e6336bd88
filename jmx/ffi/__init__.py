"""Backends in C++ and CUDA, which XLA calls through its FFI."""
