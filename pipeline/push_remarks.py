"""What a person who pushed reads in git's output: that no pipeline follows this branch or the new
name of this dataset, or that a row cannot be read. The job would say the same, but later and in
another place."""

import logging
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.errors import PipelineError
from pipeline.hub.contents import changed_files, find_paths, read_file
from pipeline.hub.large_files import LargeFiles
from pipeline.hub.payloads import RefChange
from pipeline.hub.repositories import Repository
from pipeline.moved_datasets import fault, next_step
from pipeline.pointers import Pointer
from pipeline.retrain.data_files import CARD, is_needed
from pipeline.retrain.dataset import read_dataset
from pipeline.retrain.errors import DataError
from pipeline.rules import branch_ref
from pipeline.settings import PipelineSettings

logger = logging.getLogger(__name__)

MAX_BYTES = 16 * 1024 * 1024
"""Of changed files that are read. The client waits meanwhile."""
MAX_NAMED = 5


class PushRemarks:
    def __init__(self, pipelines: Sequence[PipelineSettings]) -> None:
        self._pipelines = pipelines

    def __call__(
        self, repository: Repository, former: Sequence[str], changes: Sequence[RefChange]
    ) -> list[str]:
        """One line each; none if there is nothing to say. `former` are the names of the repository
        before it was moved, in lower case."""
        try:
            return list(self._lines(repository, former, changes))
        except (PipelineError, OSError, ValueError) as error:
            # The push is stored. Whatever is wrong with these lines, it must not look refused.
            logger.warning("no remarks on a push to %s: %s", repository.name, error)
            return []

    def _lines(
        self, repository: Repository, former: Sequence[str], changes: Sequence[RefChange]
    ) -> Iterator[str]:
        if repository.name.type != "dataset":
            return
        present = repository.name.id
        # The hub finds a name in any case, and so does the receiver.
        following = [one for one in self._pipelines if one.dataset.lower() == present.lower()]
        for pipeline in self._pipelines:
            if pipeline.dataset.lower() in former:
                yield f"{pipeline.name}: {fault(pipeline.dataset, present)}: {next_step(present)}."
        branches = [one for one in changes if one.new_sha and one.ref.startswith("refs/heads/")]
        for change in branches:
            name = change.ref.removeprefix("refs/heads/")
            pipelines = [one for one in following if branch_ref(one) == change.ref]
            if following and not pipelines:
                refs = sorted({branch_ref(one).removeprefix("refs/heads/") for one in following})
                yield f"No pipeline follows the branch {name!r}, only {', '.join(refs)}."
            for pipeline in pipelines[:1]:
                yield from _unreadable(repository, change, pipeline)


def _unreadable(
    repository: Repository, change: RefChange, pipeline: PipelineSettings
) -> Iterator[str]:
    """The rows of the changed files that a job of the pipeline could not read."""
    assert change.new_sha is not None
    files = changed_files(repository, change.old_sha, change.new_sha)
    wanted = [file for file in files if is_needed(file.path) and file.path != CARD]
    num_bytes = 0
    bad: list[DataError] = []
    missing = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = []
        for file in (*wanted, *find_paths(repository, change.new_sha, [CARD])):
            num_bytes += file.size_bytes
            if num_bytes > MAX_BYTES:
                return
            content = read_file(repository, file)
            pointer = Pointer.parse(content)
            if pointer is None:
                (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
                (folder / file.path).write_bytes(content)
                paths.append(file.path)
            elif LargeFiles(repository.folder).size(pointer.oid) is None:
                missing.append(file.path)
        read_dataset(folder, paths, pipeline.data, bad.append)
    for path in missing[:MAX_NAMED]:
        yield f"{path}: this large file was not uploaded: run `git lfs push --all origin`."
    for error in bad[:MAX_NAMED]:
        yield f"{error}"
    if len(bad) > MAX_NAMED:
        yield f"{len(bad) - MAX_NAMED} more rows cannot be read: see `pipeline data check`."
    if bad or missing:
        yield f"The job of {pipeline.name} will fail until this is mended."
