"""The torch engine: continuous batching in the server's own process. It can hold two releases in
memory at once, so a swap need not wait for running requests.

The way of a sequence: `engine` checks the sequence and submits it to its step loop. The thread of
the step loop lets the `scheduler` of each release compute one step after the other. The scheduler
plans a batch, its runner (`llama`, or `generic` for all other networks) computes the logits, and
`sampling` chooses the tokens. All new tokens of a step are handed to the event loop at once.

The way of a release: `staging` runs on a second thread, reads the tensors and builds the units of
the network.
"""
