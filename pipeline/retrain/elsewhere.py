"""A retraining on a machine without the folders of the stack: it fetches the chosen release from
the hub, and uploads its own to a branch of the same model repository. The hub then takes it from
there, and has it served (`pipeline/runner/elsewhere.py`)."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

from huggingface_hub import HfApi

from jobs.spec import JOB_URL
from pipeline.retrain.errors import HubAway
from pipeline.retrain.settings import RetrainSettings
from serving.errors import ReleaseError
from serving.weights.fetch import Source, fetch_release
from serving.weights.release_store import set_current

logger = logging.getLogger("pipeline.retrain")

UPLOAD_SECONDS, RETRY_SECONDS = 600.0, 5.0

RELEASES = "PIPELINE_RELEASES"
"""The model repository of the pipeline's releases: `owner/name`."""
CHOSEN = "PIPELINE_CHOSEN_RELEASE"
"""The id of the release from which the job goes on. Not set if there is none."""


@dataclass(frozen=True, kw_only=True)
class ReleasesOnHub:
    endpoint: str
    token: str = field(repr=False)
    repo: str
    chosen: str | None
    branch: str
    """To which the attempt uploads its release. The hub knows the name too."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> "ReleasesOnHub | None":
        """None on the machine of the stack."""
        if JOB_URL not in environ or RELEASES not in environ:
            return None
        attempt = environ[JOB_URL].rpartition("/")[2]
        return cls(
            endpoint=environ["HF_ENDPOINT"],
            token=environ["HF_TOKEN"],
            repo=environ[RELEASES],
            chosen=environ.get(CHOSEN),
            branch=f"attempts/{environ['JOB_ID']}-{attempt}",
        )

    def settings_here(self, settings: RetrainSettings, job_dir: Path) -> RetrainSettings:
        folders = {"releases_dir": job_dir / "releases", "bases_dir": job_dir / "bases"}
        return settings.model_copy(update=folders)

    def fetch_chosen(self, pipeline_dir: Path) -> None:
        """Fetch the chosen release, unless an earlier call did. Raises HubAway and ReleaseError."""
        if self.chosen is None:
            return
        logger.info("fetching %s of %s", self.chosen, self.repo)
        source = Source(endpoint=self.endpoint, repo=self.repo, token=self.token)
        try:
            release = fetch_release(pipeline_dir, source, self.chosen)
        except (HTTPException, OSError) as error:
            raise HubAway(f"{self.repo}@{self.chosen} cannot be fetched: {error!r}") from error
        if release.id != self.chosen:
            raise ReleaseError(f"{self.repo}@{self.chosen} is release {release.id}")
        set_current(pipeline_dir, release.id)

    def upload(self, folder: Path) -> None:
        """Upload the release in `folder` to the branch of this attempt. Tries for some minutes,
        because nothing of the training is left after this attempt. Raises HubAway."""
        give_up = time.monotonic() + UPLOAD_SECONDS
        while True:
            try:
                return self._upload(folder)
            except Exception as error:  # of several libraries
                if time.monotonic() > give_up:
                    raise HubAway(
                        f"the release cannot be uploaded to {self.repo}: {error}"
                    ) from error
                logger.warning("the release cannot be uploaded now: %r; trying again", error)
            time.sleep(RETRY_SECONDS)

    def _upload(self, folder: Path) -> None:
        api = HfApi(endpoint=self.endpoint, token=self.token)
        api.create_repo(self.repo, exist_ok=True)
        api.create_branch(self.repo, branch=self.branch, exist_ok=True)
        api.upload_folder(
            repo_id=self.repo,
            folder_path=folder,
            revision=self.branch,
            commit_message=f"Release of {self.branch}",
            delete_patterns="*",  # the branch begins with the files of another release
        )
