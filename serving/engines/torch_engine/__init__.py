"""The embedded engine: continuous batching on torch, two releases resident, no drain to swap.

A sequence's way: `engine` checks it and hands it to `step_loop`, whose thread gives each release's
`scheduler` a step in turn; the scheduler plans a batch, its `runner` (`llama`, or `generic` for the rest)
computes logits, `sampling` draws tokens, and the event loop gets all of a step's at once.
A release's way: `staging`, on a thread of its own, has `loading` build the network's units.
"""
