"""One module for each quant_method of config.json: from its fields to rules of names."""
