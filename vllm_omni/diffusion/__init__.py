"""The diffusion model and what runs it."""
