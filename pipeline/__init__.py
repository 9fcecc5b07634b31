"""Keeps a model up to date with its data: joins the hub, `receiver`, `jobs` and `serving` into one
product."""
