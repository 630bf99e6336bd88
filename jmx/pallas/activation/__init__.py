"""The activation between both products in kernels: its functions, its arguments' columns, and its derivative."""
