"""Kernels in Pallas. `<engine>.py` says what an engine supports; `<engine>_kernel.py` is its kernel."""
