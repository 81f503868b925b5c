"""One module for each form of tensors: from what a file stores of a Linear to a QuantizedWeight."""
