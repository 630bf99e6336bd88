"""Backend `cutlass`: FlashInfer's kernels for Hopper, compiled on the user's machine out of `src` and its package."""
