"""Names every path in the state folder. This module creates no file and no folder."""

import os
from pathlib import Path

from receiver.settings import SETTINGS_FILE, project_folder, state_dir


def settings_file() -> Path:
    """`$PIPELINE_SETTINGS`, or the `pipeline.toml` of the project. Relative paths in the settings
    start at the folder of this file, also for a service, which reads a copy of the file."""
    named = os.environ.get("PIPELINE_SETTINGS")
    return Path(named).absolute() if named is not None else project_folder() / SETTINGS_FILE


class Home:
    """The state folder: `$PIPELINE_HOME`, or the `.pipeline` of the project."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.hub_dir = root / "hub"
        self.jobs_dir = root / "jobs"
        """Holds one folder per job."""
        self.jobs_database = root / "jobs" / "jobs.sqlite"
        """The database of the job store, unless `database_url` under `[jobs]` names another
        database. The job store also records deliveries, so that one transaction stores a delivery
        and the job that the delivery starts."""
        self.releases_dir = root / "releases"
        """Holds one folder per pipeline. Each of these folders holds one folder per release."""
        self.followed_dir = root / "followed"
        """Like `releases_dir`, for the pipelines of other machines that `pipeline serve --follow`
        serves. They have a folder of their own, because the follower removes old releases."""
        self.bases_dir = root / "bases"
        """Holds the base models. A preset (a small model that hotpush itself makes) is created once
        for each pipeline, in a folder with the pipeline's name. A model from a hub is downloaded
        once for all pipelines, into the folder `hub`. The folder `answers` holds the answers that
        the base models gave to everyday prompts. Retrainings use these answers to keep the model
        from drifting away from its base model."""
        self.snapshots_dir = root / "snapshots"
        """Holds one folder per pipeline, with the dataset revisions that the pipeline's jobs have
        downloaded."""
        self.tokens_file = root / "tokens.json"
        """Holds the secrets that the services share (`pipeline/tokens.py`)."""
        self.own_webhook_file = root / "own-webhook"
        """Holds the id of the stack's own webhook on the stack's own hub
        (`pipeline/stack/subscriptions.py`)."""
        self.stack_file = root / "stack.json"
        """While a stack is up, this file holds the process ids and addresses of its services."""
        self.settings_copy = root / "settings.toml"
        """While a stack is up, this file holds the settings file as it was when the stack was
        started (`write_settings_copy`)."""
        self.runner_alive = root / "runner.alive"
        """The runner touches this file several times a second while it works."""
        self.stack_lock = root / "stack.lock"
        """A running stack holds a lock on this file, so that no second stack uses the state
        folder."""

    @classmethod
    def find(cls) -> "Home":
        return cls(state_dir())

    def log_file(self, service: str) -> Path:
        return self.root / "logs" / f"{service}.log"
