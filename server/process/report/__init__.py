"""What the server says at its start and while it runs."""
