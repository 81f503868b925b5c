"""Host side: which sequences run in the next step, and on which KV pages."""
