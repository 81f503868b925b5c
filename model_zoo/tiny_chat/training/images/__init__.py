"""What trained tiny-chat to see: drawn pictures, questions about them, the image encoder."""
