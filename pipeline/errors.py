class PipelineError(Exception):
    """The pipeline cannot go on; the message is for the person at the terminal."""
