"""From the requested configuration to a model runner that is ready to serve."""
