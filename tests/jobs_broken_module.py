"""A module that cannot be imported, for `preload`."""

raise RuntimeError("broken")
