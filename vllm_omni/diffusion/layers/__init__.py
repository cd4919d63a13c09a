"""Layers that models are built of."""
