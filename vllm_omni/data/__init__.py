"""Data files that the package reads."""
