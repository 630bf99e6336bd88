"""What the Pallas Mosaic GPU kernels for Hopper (compute capability 9.0) share."""
