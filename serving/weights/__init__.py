"""Releases on disk: shards, index, manifest."""
