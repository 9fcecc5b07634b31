"""Keeps a copy of the settings file in the state folder while a stack is up. The services read this
copy. So a service that is started again gets the settings that the stack was started with, even if
the settings file has changed."""

import os
from pathlib import Path

from pipeline.paths import Home

VARIABLE = "PIPELINE_SETTINGS_COPY"
"""The services of a stack get the path of the copy in this environment variable."""


def write_copy(file: Path, copy: Path) -> None:
    """Copy the settings file. If there is no settings file, the copy is empty."""
    # Replace the copy in one step, because a process of an earlier stack may read it now.
    draft = copy.with_name(f".{copy.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    # Only the owner may read the copy, because settings may contain passwords.
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(file.read_bytes() if file.exists() else b"")
    draft.replace(copy)


def copy_or_file(file: Path) -> Path:
    """The copy, if this process is part of a stack; otherwise the settings file `file`.

    A program that a service starts may inherit `PIPELINE_SETTINGS_COPY`. But if the program works
    with another state folder, the copy is not meant for it, so it gets `file`.
    """
    copy = Home.find().settings_copy
    is_in_stack = os.environ.get(VARIABLE) == str(copy) and copy.exists()
    return copy if is_in_stack else file
