"""Process groups and exchanges between ranks."""
