"""Named pictures."""
