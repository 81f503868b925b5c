"""What a vision model sees of images: pixels as rows of patches."""
