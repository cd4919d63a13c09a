"""Deploy files and command lines, resolved into frozen configuration."""
