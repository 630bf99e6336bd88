"""Attention of a decoder, as functions that take kernels where they can, and as a module."""
