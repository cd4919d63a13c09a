"""World models, what a worker asks of one, and the reader of their weights."""
