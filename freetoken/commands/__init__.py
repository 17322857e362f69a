"""The subcommands of ft, one module each."""
