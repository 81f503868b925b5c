"""What to say of a model that is not supported: the nearest one that is, and what differs."""
