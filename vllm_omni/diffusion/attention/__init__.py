"""Attention backends, chosen once by name."""
