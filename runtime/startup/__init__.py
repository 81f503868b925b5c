"""From the requested configuration to an executor that is ready to serve."""
