"""What is recorded of every HTTP request: a count, a line in the log, a trace."""
