"""The pipeline's error tree starts here; each of its packages adds its own branch."""


class PipelineError(Exception):
    """The pipeline cannot go on; the message is for the person at the terminal."""
