"""Stores jobs and runs them."""
