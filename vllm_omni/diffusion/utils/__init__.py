"""Helpers for users of the package: camera paths, first pictures, video files."""
