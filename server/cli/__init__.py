"""The `wavefill` command: flags, subcommands, and finding a model's directory."""
