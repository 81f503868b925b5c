"""What /dashboard shows: collected while a page is open, sent as server-sent events."""
