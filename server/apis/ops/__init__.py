"""Health, metrics, the request log, and the offline API documentation."""
