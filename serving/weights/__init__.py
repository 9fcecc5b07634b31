"""Writes, reads and checks releases on disk. A release is a folder with weights that can be served.
The folder holds shards (files of tensors), an index (it says which shard holds which tensor), a
manifest (it lists the sizes and digests of all files and tensors), and small files such as the
config."""
