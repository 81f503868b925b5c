"""Training data, training and evaluation of tiny-chat; not in the wheel."""
