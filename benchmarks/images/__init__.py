"""Images in: their time to first token, the encoder, and what they cost streams beside them."""
