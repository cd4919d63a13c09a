"""What users call: Python API, command line, server."""
