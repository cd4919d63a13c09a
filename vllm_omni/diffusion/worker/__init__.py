"""The worker process."""
