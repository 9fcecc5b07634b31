"""Keeps a model up to date with its dataset. This package contains the hub (`pipeline.hub`), and
joins it with the packages `receiver`, `jobs` and `serving` into one product."""
