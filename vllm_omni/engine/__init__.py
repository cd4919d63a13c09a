"""Sessions, interactions and the chunk scheduler."""
