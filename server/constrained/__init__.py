"""Structured output: from the fields of a request to a checked grammar."""
