"""Finds what a push would train on, without training."""

import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.hub.names import repository_name
from pipeline.hub.repositories import Repositories
from pipeline.paths import Home
from pipeline.retrain.base_model import PRESETS, cached_folder
from pipeline.retrain.dataset import check_not_empty, read_dataset
from pipeline.retrain.errors import BaseModelError, DataError
from pipeline.retrain.git_snapshot import GitDataset
from pipeline.retrain.held_out import held_out_now
from pipeline.retrain.parent import chosen_release
from pipeline.retrain.report import DataReport, report_on
from pipeline.retrain.rows import Row
from pipeline.retrain.settings import DataSettings, is_git_url
from pipeline.settings import PipelineSettings

WHOLE = 1 << 30
"""The largest number of tokens in a sequence: so large that every row is counted whole."""


def check_data(folder: Path | None, home: Home, pipeline: PipelineSettings | None) -> DataReport:
    """Read the files of `folder` as a job would read a commit of them. Raises PipelineError.

    Without `folder`, read the working folder's git clone if it is a clone of the pipeline's
    dataset, else the newest commit of the dataset.
    """
    settings = pipeline.data if pipeline is not None else DataSettings()
    bad: list[DataError] = []
    with _files(folder, home, pipeline) as (root, files):
        dataset = read_dataset(root, files, settings, bad.append)
    if not bad:  # else the bad rows are the reason, and the dataset is not empty without them
        try:
            check_not_empty(dataset)
        except DataError as error:
            bad.append(error)
    bases_dir = home.bases_dir / pipeline.name if pipeline is not None else None
    share = held_out_now(bases_dir, dataset, settings)
    rows = [row for row in dataset.train if row.digest not in share]
    held_out = [*dataset.held_out, *(row for row in dataset.train if row.digest in share)]
    num_tokens, refused = _count_tokens(rows, home, pipeline)
    return report_on(dataset, rows, held_out, bad=map(str, (*bad, *refused)), num_tokens=num_tokens)


@contextmanager
def _files(
    folder: Path | None, home: Home, pipeline: PipelineSettings | None
) -> Iterator[tuple[Path, Sequence[str]]]:
    """The folder, and its files that a commit of everything would contain."""
    if folder is None and pipeline is not None:
        folder = _clone_of(pipeline.dataset)
    if folder is not None:
        if not folder.is_dir():
            raise PipelineError(f"there is no folder {folder}; name one that holds data files")
        yield folder, _tracked(folder)
        return
    if pipeline is None:
        raise PipelineError(
            "no pipeline is configured here, so there is no dataset to look at; name a folder: "
            "pipeline data check FOLDER"
        )
    with tempfile.TemporaryDirectory() as temporary:
        source = GitDataset(_address(home, pipeline), Path(temporary))
        ref = pipeline.ref if pipeline.ref.startswith("refs/") else f"refs/heads/{pipeline.ref}"
        revision = source.download(source.head(ref))
        yield revision.folder, (*revision.files, *revision.others)


def _address(home: Home, pipeline: PipelineSettings) -> str:
    """Where git fetches the dataset from. For a dataset on the embedded hub, this is the hub's
    repository on disk."""
    if is_git_url(pipeline.dataset):
        return pipeline.dataset
    name = repository_name("dataset", *pipeline.dataset.split("/"))
    repository = Repositories(home.hub_dir).folder(name)
    if not repository.is_dir():
        raise PipelineError(
            f"there is no dataset {pipeline.dataset} in {home.hub_dir}; start the stack once with "
            "`pipeline up`, or name a folder: pipeline data check FOLDER"
        )
    return str(repository)


def _clone_of(dataset: str) -> Path | None:
    """The top folder of the git clone that is the working folder or contains it; None if that is
    not a clone of the dataset."""
    top, remotes = _git("rev-parse", "--show-toplevel"), _git("remote", "-v")
    if not top or not remotes:
        return None
    addresses = {line.split()[1].removesuffix(".git").rstrip("/") for line in remotes.splitlines()}
    wanted = dataset.removesuffix(".git").rstrip("/")
    is_clone = any(each == wanted or each.endswith(f"/datasets/{wanted}") for each in addresses)
    return Path(top.strip()) if is_clone else None


def _tracked(folder: Path) -> Sequence[str]:
    """In a git clone, all files except ignored ones; in any other folder, all files."""
    listed = _git("ls-files", "--cached", "--others", "--exclude-standard", "-z", folder=folder)
    if listed is not None:
        return [file for file in listed.split("\0") if file and (folder / file).is_file()]
    files = (path for path in folder.rglob("*") if path.is_file())
    return [path.relative_to(folder).as_posix() for path in files]


def _git(*arguments: str, folder: Path = Path()) -> str | None:
    done = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    return done.stdout if done.returncode == 0 else None


def _count_tokens(
    rows: Sequence[Row], home: Home, pipeline: PipelineSettings | None
) -> tuple[int | None, list[PipelineError]]:
    """The number of tokens in the rows (None if no tokenizer is on this disk), and an error for
    each row that the tokenizer refuses."""
    tokenizer = _tokenizer(home, pipeline) if pipeline is not None else None
    if tokenizer is None:
        return None, []
    from pipeline.retrain.tokens import sequences

    count, refused = 0, list[PipelineError]()
    for row in rows:
        try:
            count += sum(len(each.token_ids) for each in sequences([row], tokenizer, WHOLE))
        except DataError as error:
            refused.append(error)
        except BaseModelError as error:
            return None, [error]
    return count, refused


def _tokenizer(home: Home, pipeline: PipelineSettings) -> Any:
    """The tokenizer of the release that a job would start from, else of the base model; None if
    neither is on this disk."""
    folders = [chosen_release(home.releases_dir / pipeline.name), pipeline.base_folder()]
    if pipeline.base_model in PRESETS:
        folders.append(home.bases_dir / pipeline.name / pipeline.base_model.partition(":")[2])
    else:
        repo = pipeline.base_model.partition("@")[0]
        folders += sorted(cached_folder(home.bases_dir / "hub", repo).glob("*"))
    for folder in folders:
        if folder is not None and (folder / "tokenizer_config.json").is_file():
            try:
                from transformers import AutoTokenizer
            except ImportError:
                return None
            return AutoTokenizer.from_pretrained(folder)
    return None
