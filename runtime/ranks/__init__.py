"""The processes that share a model: what they tell each other before and while they serve."""
