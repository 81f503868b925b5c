"""`wavefill doctor`: what a server needs of this machine, each checked on its own."""
