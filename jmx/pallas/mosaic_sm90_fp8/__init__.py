"""Backend `mosaic_fp8`: inputs in FP8 on Hopper's FP8 tensor cores, in Pallas Mosaic GPU."""
