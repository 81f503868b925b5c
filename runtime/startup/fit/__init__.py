"""What would fit on a device, and on how many, by the shape of a model: no weights are loaded."""
