"""One file for each subcommand of `wavefill`, imported when it is run."""
