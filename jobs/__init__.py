"""What to run, where it stands and how it starts."""
