"""Backend `mosaic`: weights dequantized in registers for Hopper's 16-bit tensor cores, in Pallas Mosaic GPU."""
