"""The embedded engine: continuous batching on torch, two releases resident, no drain to swap."""
