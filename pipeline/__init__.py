"""Keeps a model up to date with its dataset. This package contains the hub (`pipeline.hub`), and
the code that makes one product of the hub and the packages `receiver`, `jobs` and `serving`."""
