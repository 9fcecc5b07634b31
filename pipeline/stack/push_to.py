"""Keeps the repository `push_to` of a pipeline at the served release: in a thread of the hub, whose
repository `local/<pipeline>` has the same releases."""

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from pipeline.errors import PipelineError
from pipeline.paths import Home
from pipeline.retrain.job import read_record, write_record
from pipeline.retrain.sources import OWN_TOKEN_SOURCE, own_token
from pipeline.settings import PipelineSettings, Settings
from pipeline.tokens import load_tokens
from serving.errors import ServingError, first_line
from serving.weights.release_store import served_release

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
RETRY_SECONDS = 600.0

_RECORD = "pushed.json"


class Pushed(BaseModel):
    """The last try to push a release."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    release: str
    time: float
    """Seconds since the epoch."""
    failure: str | None


def last_push(pipeline_dir: Path) -> Pushed | None:
    return read_record(pipeline_dir / _RECORD, Pushed)


@contextmanager
def pushing(settings: Settings, home: Home) -> Iterator[None]:
    """Inside, each release that becomes the served one is pushed, for the pipelines that have
    `push_to`. The thread that does this looks once more at the end."""
    pipelines = [each for each in settings.pipelines if each.push_to is not None]
    stop = threading.Event()
    thread = threading.Thread(target=_keep_pushed, args=(pipelines, home, stop), name="push")
    if pipelines:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if pipelines:
            thread.join()


def _keep_pushed(pipelines: Sequence[PipelineSettings], home: Home, stop: threading.Event) -> None:
    is_last = False
    while not is_last:
        is_last = stop.wait(LOOK_SECONDS)
        for pipeline in pipelines:
            try:
                token = own_token(os.environ, load_tokens(home.tokens_file).hub)
                push_served(pipeline, home.releases_dir / pipeline.name, token)
            except (OSError, ServingError, PipelineError) as error:
                logger.error("%s is not kept at the served release: %s", pipeline.push_to, error)
                is_last |= stop.wait(RETRY_SECONDS)


def push_served(pipeline: PipelineSettings, pipeline_dir: Path, token: str | None) -> None:
    """Push the served release to `push_to`, as its `main` and as a tag, unless that was done. If it
    fails, log and record why, and try again when RETRY_SECONDS have passed. Raises OSError, and
    ReleaseError if the record of what is served is damaged."""
    last, folder = last_push(pipeline_dir), served_release(pipeline_dir)
    assert pipeline.push_to is not None
    if folder is None or not folder.exists() or (last is not None and _is_enough(last, folder)):
        return
    from huggingface_hub import HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    release, failure = folder.name, None
    ids = {"pipeline": pipeline.name, "release": release}
    where = f"{pipeline.push_to} on {pipeline.push_endpoint}"
    disable_progress_bars()
    # False: without it, the client would send the stack's own token, if the shell has it.
    api = HfApi(pipeline.push_endpoint, token or False)
    try:
        # The weights may have learned private rows, so nobody else may read a new repository.
        api.create_repo(pipeline.push_to, private=True, exist_ok=True)
        commit = api.upload_folder(
            repo_id=pipeline.push_to,
            folder_path=folder,
            commit_message=f"Release {release}",
            delete_patterns="*",  # the files of the release before
        )
        api.create_tag(pipeline.push_to, tag=release, revision=commit.oid, exist_ok=True)
    except Exception as error:
        reason = first_line(error) if token else f"there is no token; set {OWN_TOKEN_SOURCE}"
        failure = f"{release} was not pushed to {where}: {reason}"
        logger.warning("%s", failure, extra=ids)
    else:
        logger.info("pushed %s to %s", release, where, extra=ids)
    tried = Pushed(release=release, time=time.time(), failure=failure)
    write_record(pipeline_dir / _RECORD, tried)


def _is_enough(last: Pushed, served: Path) -> bool:
    waits = last.failure is not None and time.time() < last.time + RETRY_SECONDS
    return last.release == served.name and (last.failure is None or waits)
