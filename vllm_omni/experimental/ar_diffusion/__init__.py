"""Chunk-wise autoregressive diffusion."""
