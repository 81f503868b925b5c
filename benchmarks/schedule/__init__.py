"""The scheduler on a simulated device."""
