"""The reference in plain jax.numpy, an engine like the others."""
