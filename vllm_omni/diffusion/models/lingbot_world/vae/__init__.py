"""The Wan VAE with explicit streaming state."""
