"""Backend `triton`: packed 4-bit weights on Ampere and Ada, in Pallas Triton."""
