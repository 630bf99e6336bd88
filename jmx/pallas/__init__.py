"""Kernels in Pallas, a folder an engine: `backend` says what it supports, `kernel` is its kernel."""
