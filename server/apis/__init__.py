"""One folder for each API; what several of them share lies here."""
