"""Every path in the state folder. Reading a path here creates nothing."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Home:
    """The state folder: `$PIPELINE_HOME`, else `./.pipeline`."""

    root: Path

    @classmethod
    def find(cls) -> "Home":
        return cls(Path(os.environ.get("PIPELINE_HOME", ".pipeline")).absolute())

    @property
    def hub_dir(self) -> Path:
        return self.root / "hub"

    @property
    def jobs_dir(self) -> Path:
        """One folder per job."""
        return self.root / "jobs"

    @property
    def jobs_database(self) -> Path:
        """The database of the job store. The receiver and the runner share it, so that a delivery
        and its job are stored in one transaction."""
        return self.root / "jobs" / "jobs.sqlite"

    @property
    def releases_dir(self) -> Path:
        """One folder per pipeline, which holds one folder per release."""
        return self.root / "releases"

    @property
    def bases_dir(self) -> Path:
        """One folder per pipeline, with the pipeline's base model, which is created or downloaded
        once."""
        return self.root / "bases"

    @property
    def snapshots_dir(self) -> Path:
        """One folder per pipeline, with the dataset revisions that its jobs have downloaded."""
        return self.root / "snapshots"

    @property
    def tokens_file(self) -> Path:
        return self.root / "tokens.json"

    @property
    def stack_file(self) -> Path:
        """The process ids and addresses of the services, while a stack is up."""
        return self.root / "stack.json"

    @property
    def stack_lock(self) -> Path:
        return self.root / "stack.lock"

    def log_file(self, service: str) -> Path:
        return self.root / "logs" / f"{service}.log"
