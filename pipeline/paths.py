"""Names every path in the state folder. This module creates no file and no folder."""

import os
from dataclasses import dataclass
from pathlib import Path

from receiver.project import SETTINGS_FILE, project_folder, state_dir


def settings_file() -> Path:
    """`$PIPELINE_SETTINGS`, or the `pipeline.toml` of the project. Relative paths in the settings
    start at the folder of this file, also for a service, which reads a copy of the file."""
    named = os.environ.get("PIPELINE_SETTINGS")
    return Path(named).absolute() if named is not None else project_folder() / SETTINGS_FILE


@dataclass(frozen=True)
class Home:
    """The state folder: `$PIPELINE_HOME`, or the `.pipeline` of the project."""

    root: Path

    @classmethod
    def find(cls) -> "Home":
        return cls(state_dir())

    @property
    def hub_dir(self) -> Path:
        return self.root / "hub"

    @property
    def jobs_dir(self) -> Path:
        """Holds one folder per job."""
        return self.root / "jobs"

    @property
    def jobs_database(self) -> Path:
        """The database of the job store, unless `database_url` under `[jobs]` names another
        database. The job store also records deliveries, so that one transaction stores a delivery
        and the job that the delivery starts."""
        return self.root / "jobs" / "jobs.sqlite"

    @property
    def releases_dir(self) -> Path:
        """Holds one folder per pipeline. Each of these folders holds one folder per release."""
        return self.root / "releases"

    @property
    def bases_dir(self) -> Path:
        """Holds the base models. A preset (a small model that hotpush itself makes) is created once
        for each pipeline, in a folder with the pipeline's name. A model from a hub is downloaded
        once for all pipelines, into the folder `hub`. The folder `answers` holds the answers that
        the base models gave to everyday prompts. Retrainings use these answers to keep the model
        from drifting away from its base model."""
        return self.root / "bases"

    @property
    def snapshots_dir(self) -> Path:
        """Holds one folder per pipeline, with the dataset revisions that the pipeline's jobs have
        downloaded."""
        return self.root / "snapshots"

    @property
    def tokens_file(self) -> Path:
        """Holds the secrets that the services share (`pipeline/tokens.py`)."""
        return self.root / "tokens.json"

    @property
    def own_webhook_file(self) -> Path:
        """Holds the id of the stack's own webhook on the stack's own hub
        (`pipeline/subscriptions.py`)."""
        return self.root / "own-webhook"

    @property
    def stack_file(self) -> Path:
        """While a stack is up, this file holds the process ids and addresses of its services."""
        return self.root / "stack.json"

    @property
    def settings_copy(self) -> Path:
        """While a stack is up, this file holds the settings file as it was when the stack was
        started (`write_settings_copy`)."""
        return self.root / "settings.toml"

    @property
    def runner_alive(self) -> Path:
        """The runner touches this file several times a second while it works."""
        return self.root / "runner.alive"

    @property
    def stack_lock(self) -> Path:
        """A running stack holds a lock on this file, so that no second stack uses the state
        folder."""
        return self.root / "stack.lock"

    def log_file(self, service: str) -> Path:
        return self.root / "logs" / f"{service}.log"
