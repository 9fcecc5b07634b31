class PipelineError(Exception):
    """A command or service cannot continue. The message tells the user why, and what to do."""
