"""The reference in plain jax.numpy, which is a backend like the others."""
