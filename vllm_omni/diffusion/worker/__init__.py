"""One rank of a worker group and the process that it runs in."""
