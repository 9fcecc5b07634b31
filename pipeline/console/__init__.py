"""The console: the pages of the hub's address, on which a person sees what the loop does, and
drives it."""
