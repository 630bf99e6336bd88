"""Text from and to token ids."""
