"""Host side of images: whose features the device has, and which stages of the encoder run when."""
