"""Says what is wrong, and what to do about it: with a stack, with a folder of data, and with a
push."""
