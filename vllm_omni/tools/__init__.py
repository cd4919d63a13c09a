"""Command-line tools beside the server."""
