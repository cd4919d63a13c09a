"""Helpers of the public surface."""
