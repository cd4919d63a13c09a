"""Autoregressive diffusion in chunks: the KV window, and the engine's import path."""
