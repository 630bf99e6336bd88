"""Backend `cutlass`: FlashInfer's kernels for Hopper, compiled on the user's machine from `src` and its package."""
