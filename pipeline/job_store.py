"""Which database the jobs of this state folder are in."""

from jobs.store import JobStore
from pipeline.paths import Home
from pipeline.settings import Settings


def open_job_store(settings: Settings, home: Home) -> JobStore:
    """The store that the settings name, else the one of the state folder, which is made."""
    if settings.jobs.database_url is not None:
        return JobStore.open(settings.jobs.database_url)
    home.jobs_dir.mkdir(parents=True, exist_ok=True)
    return JobStore.open(home.jobs_database)
