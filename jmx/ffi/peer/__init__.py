"""Exchanges between the GPUs of one process by kernels that write into each other's memory."""
