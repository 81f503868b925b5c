"""Pages for a browser: the playground at `/`, and the static files that it is made of."""
