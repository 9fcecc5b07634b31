"""Finds the project of this process: the folder that has the settings file and the state folder of
a stack."""

import os
from pathlib import Path

SETTINGS_FILE = "pipeline.toml"
STATE_FOLDER = ".pipeline"
PROJECT_OF_SHELL = "PIPELINE_PROJECT"
"""`pipeline env` sets this variable to the folder of its project, so that commands also work in a
clone that is elsewhere. The working folder comes first: after `cd` to another project, all commands
act on that project."""


def project_folder() -> Path:
    """The nearest folder that has a settings file or a state folder: the working folder or one
    above it. If there is none, the project of this shell, else the working folder."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if any(os.path.exists(folder / name) for name in (SETTINGS_FILE, STATE_FOLDER)):
            return folder
    return Path(os.environ.get(PROJECT_OF_SHELL, here))


def state_dir() -> Path:
    """The state folder of the stack: `$PIPELINE_HOME`, or the `.pipeline` of the project."""
    named = os.environ.get("PIPELINE_HOME")
    return Path(named).absolute() if named is not None else project_folder() / STATE_FOLDER
