"""Keeps a model up to date with its data. Joins `jobs`, `serving` and `receiver` into one
product."""
