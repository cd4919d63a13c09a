"""Ways to run a worker group."""
