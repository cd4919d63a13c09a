"""Models and their loader."""
