"""Import paths that existing deploy files name."""
