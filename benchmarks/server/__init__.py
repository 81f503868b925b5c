"""Running servers under load."""
