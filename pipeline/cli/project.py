"""Finds the state folder for commands that report on a stack or change its data."""

import os

from pipeline.paths import Home


def project_home() -> Home:
    """The state folder. Unlike `Home.find`, this function raises PipelineError if the shell is in
    no project. This is the case if there is neither a settings file nor a state folder, and neither
    `PIPELINE_HOME` nor `PIPELINE_SETTINGS` is set. Without the error, a command would report that
    nothing is up, although a stack may be up in another folder."""
    from pipeline.settings import no_settings_file, settings_file

    home = Home.find()
    is_named = "PIPELINE_HOME" in os.environ or "PIPELINE_SETTINGS" in os.environ
    if is_named or home.root.exists() or settings_file().exists():
        return home
    raise no_settings_file()
