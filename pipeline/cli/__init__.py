"""The `pipeline` command: each subcommand parses, calls down and prints."""
