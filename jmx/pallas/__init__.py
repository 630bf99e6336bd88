"""Kernels in Pallas, one package per backend: `backend` states what it supports, `kernel` is its kernel.

`mosaic_sm90` and `mosaic_sm90_fp8` are built on `sm90`, the parts that both Hopper kernels share.
"""
