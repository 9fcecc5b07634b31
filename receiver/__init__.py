"""Receives webhooks: checks the proof of a delivery, calls its handler, and answers. This package
can be used alone, as a library."""
