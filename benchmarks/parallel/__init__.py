"""What several GPUs of a host do together."""
