"""The paged window KV cache."""
