"""Layers and linear methods that any model can be built from."""
