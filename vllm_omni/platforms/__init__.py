"""The device a process runs on."""
