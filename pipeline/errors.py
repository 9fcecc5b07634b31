class PipelineError(Exception):
    """A command or service cannot go on. The message is for the person at the terminal."""
