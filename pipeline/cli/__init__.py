"""The `pipeline` command. A subcommand parses its options, calls the packages that do the work, and
prints the result."""
