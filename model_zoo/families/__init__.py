"""Readers of config.json, one for each family whose fields differ from Llama's."""
