"""A request in an API process: admission, parameters, choices, text, log-probabilities."""
