"""Writes, reads and checks releases on disk. A release is a folder with shards (files of tensors),
an index, a manifest and small files such as the config."""
