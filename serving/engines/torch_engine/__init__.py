"""The embedded engine: continuous batching on torch, two releases resident, swaps without a drain."""
