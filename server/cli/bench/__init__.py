"""`wavefill bench`: its kinds of measurement (serve, sweep, compare) and the options they share."""
