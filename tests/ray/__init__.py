"""Worker groups on Ray: lost machines, a lost head, a server with Ray, overhead."""
