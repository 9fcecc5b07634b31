"""Reports which rows a job would train on if the user pushed a folder. Trains nothing."""

import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.spec import full_ref
from pipeline.errors import PipelineError
from pipeline.formats import Pointer, may_be_pointer
from pipeline.paths import Home
from pipeline.retrain.base_model import (
    CONTEXT,
    PRESETS,
    cached_folder,
    find_base,
    longest_sequence,
    train_tokenizer,
)
from pipeline.retrain.data import divide, report_on, too_long
from pipeline.retrain.dataset import check_not_empty, read_dataset, shown, why_no_data
from pipeline.retrain.errors import BaseModelAway, BaseModelError, DataError, HubAway
from pipeline.retrain.job import find_parent
from pipeline.retrain.rows import Row
from pipeline.retrain.settings import DataSettings
from pipeline.retrain.sources import Hubs
from pipeline.settings import PipelineSettings, Settings
from pipeline.tokens import load_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def pipeline_of(
    name: str | None, folder: Path | None, settings: Settings
) -> PipelineSettings | None:
    """The pipeline called `name`. If `name` is None, the result depends on how many pipelines are
    configured:

    - none: None;
    - one: this pipeline;
    - several: the pipeline that follows a dataset, if `folder` (by default the working folder) is
      in a git clone of this dataset.

    Raises PipelineError if no pipeline is called `name`. In the case of several pipelines, raises
    PipelineError if none of them or more than one of them follows the dataset of the clone.
    """
    if name is None and not settings.pipelines:
        return None
    if name is None and len(settings.pipelines) > 1:
        found = [each for each in settings.pipelines if _clone_of(each.dataset, folder or Path())]
        name = found[0].name if len(found) == 1 else None
    return settings.pipeline(name)


def check_data(
    folder: Path | None, home: Home, settings: Settings, pipeline: PipelineSettings | None
) -> tuple[list[str], bool]:
    """Read the files of `folder` as a job would read them from a commit. Returns a report in lines,
    and whether a row or a file is bad. Raises PipelineError.

    If `folder` is None, there are two cases. If the working folder is in a git clone of the
    pipeline's dataset, read the files of this clone. Otherwise, read the newest commit of the
    branch that the pipeline follows.
    """
    reading = pipeline.data if pipeline is not None else DataSettings()
    bad: list[PipelineError] = []
    with _files(folder, home, settings, pipeline) as (root, files, links):
        bad += [
            DataError.at(
                shown(link), None, "it is a symbolic link; put the file itself in its place"
            )
            for link in links
            if why_no_data(link) is None
        ]
        # Without git-lfs, a clone has pointers in place of large files.
        pointers = {
            file: "only its pointer of Git LFS is here, and a job fetches the content (`git lfs "
            "pull` fetches it too)"
            for file in files
            if why_no_data(file) is None and _is_pointer(root / file)
        }
        files = [file for file in files if file not in pointers]
        # A job refuses files whose names are not UTF-8.
        readable = [file for file in files if shown(file) == file]
        bad += [
            DataError.at(shown(file), None, "its name is not UTF-8; rename the file")
            for file in sorted(set(files) - set(readable))
            if why_no_data(file) is None
        ]
        dataset = read_dataset(root, readable, reading, bad.append)
    # If rows are bad, do not also report that the dataset has no rows: the dataset may be empty
    # only because the bad rows were left out.
    if not bad and not pointers:
        try:
            check_not_empty(dataset)
        except DataError as error:
            bad.append(error)
    rows, held_out = divide(dataset, reading)
    num_tokens, cut = None, None
    try:
        if pipeline is not None and (found := _tokenizer(rows, home, settings, pipeline)):
            from pipeline.retrain.tokens import row_lengths

            tokenizer, max_length = found
            num_tokens, long = row_lengths(rows, tokenizer, max_length, bad.append)
            cut = too_long(long, max_length)
    except BaseModelError as error:
        bad.append(error)
    report = report_on(
        dataset, rows, held_out, bad=bad, elsewhere=pointers, num_tokens=num_tokens, cut=cut
    )
    return list(report), bool(bad)


@contextmanager
def _files(
    folder: Path | None, home: Home, settings: Settings, pipeline: PipelineSettings | None
) -> Iterator[tuple[Path, Sequence[str], Sequence[str]]]:
    """Yields a folder, the files of the dataset in this folder, and the symbolic links in this
    folder. If the folder belongs to the user, the files are those that a commit of the complete
    folder would contain. If the folder is a download, the files are those of the downloaded commit,
    and there are no links.

    A link is not a file of the dataset: a commit contains only the path to which the link points,
    and this path may lead out of the folder."""
    if folder is None and pipeline is not None:
        folder = _clone_of(pipeline.dataset, Path())
    if folder is not None:
        if not folder.is_dir():
            raise PipelineError(f"there is no folder {folder}; name a folder with data files")
        paths = _tracked(folder)
        links = [path for path in paths if (folder / path).is_symlink()]
        yield folder, [path for path in paths if path not in links], links
        return
    if pipeline is None:
        raise PipelineError(
            "no pipeline is configured here; name a folder: pipeline data check FOLDER"
        )
    with tempfile.TemporaryDirectory() as temporary:
        endpoint = settings.other_hub(pipeline) or "hub"
        source = _hubs(home, settings).dataset(pipeline.dataset, endpoint, Path(temporary))
        try:
            revision = source.download(source.head(full_ref(pipeline.ref)))
        except HubAway as error:
            if not settings.is_on_own_hub(pipeline):
                raise
            step = "start the stack (pipeline up), or name a folder to check"
            raise PipelineError(f"{error}; {step}") from error
        yield revision.folder, revision.files, ()


def _is_pointer(path: Path) -> bool:
    return may_be_pointer(path.stat().st_size) and Pointer.parse(path.read_bytes()) is not None


def _hubs(home: Home, settings: Settings) -> Hubs:
    return Hubs.of_shell(settings.hub_url, load_tokens(home.tokens_file).hub)


def _clone_of(dataset: str, folder: Path) -> Path | None:
    """If `folder` is in a git clone of `dataset`, the top folder of this clone. None if `folder` is
    in a clone of another repository, or in no clone."""
    top = _git("rev-parse", "--show-toplevel", folder=folder)
    remotes = _git("remote", "-v", folder=folder)
    if not top or not remotes:
        return None
    # A line is `<name><tab><address> (fetch)`. A note such as ` [blob:none]` may follow.
    addresses = {
        line.partition("\t")[2].rpartition(" (")[0].removesuffix(".git").rstrip("/")
        for line in remotes.splitlines()
    }
    wanted = dataset.removesuffix(".git").rstrip("/")
    on_hub = f"/datasets/{wanted}".lower()  # the hub ignores case
    is_clone = any(each == wanted or each.lower().endswith(on_hub) for each in addresses)
    return Path(top.strip()) if is_clone else None


def _is_entry(path: Path) -> bool:
    """Whether a commit would contain the path itself: a file, or a link to anything."""
    return path.is_symlink() or path.is_file()


def _tracked(folder: Path) -> Sequence[str]:
    """The files and links that a commit of this folder would contain. In a git clone, files and
    links that git ignores are left out. In any other folder, nothing is left out. A folder that a
    git repository around it ignores is such another folder."""
    listed = _git("ls-files", "--cached", "--others", "--exclude-standard", "-z", folder=folder)
    if listed is not None and (listed or not _is_ignored(folder)):
        return [file for file in listed.split("\0") if file and _is_entry(folder / file)]
    files = (path for path in folder.rglob("*") if _is_entry(path))
    return [path.relative_to(folder).as_posix() for path in files]


def _is_ignored(folder: Path) -> bool:
    return _git("check-ignore", "--quiet", ".", folder=folder) is not None


def _git(*arguments: str, folder: Path = Path()) -> str | None:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        capture_output=True,
        text=True,
        errors="surrogateescape",  # the name of a file may have any bytes
        check=False,
    )
    return done.stdout if done.returncode == 0 else None


def _tokenizer_folder(pipeline: PipelineSettings, home: Home) -> Path | None:
    """The folder of the tokenizer that a job would use: the release from which it starts to train,
    or the base model. None if the base model was not made or fetched yet. Raises ReleaseError."""
    base_model = str(pipeline.base_folder() or pipeline.base_model)
    parent = find_parent(home.releases_dir / pipeline.name)
    if parent is not None and parent.lineage.base_model == base_model:
        return parent.folder
    if base_model in PRESETS:
        folders = [home.bases_dir / pipeline.name / base_model.partition(":")[2]]
    else:
        cached = cached_folder(home.bases_dir / "hub", base_model.partition("@")[0])
        folders = [Path(base_model), *sorted(cached.glob("*"))]
    return next((each for each in folders if (each / "tokenizer_config.json").is_file()), None)


def _tokenizer(
    rows: Sequence[Row], home: Home, settings: Settings, pipeline: PipelineSettings
) -> tuple["PreTrainedTokenizerBase", int] | None:
    """The tokenizer that a job would use, and the largest number of tokens in one training
    sequence. None if `transformers` is not installed, or the hub of the base model does not answer.
    Raises BaseModelError."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        return None
    base_model = str(pipeline.base_folder() or pipeline.base_model)
    context: int | None = CONTEXT
    folder = _tokenizer_folder(pipeline, home)
    if folder is None and base_model not in PRESETS:
        endpoint, token = _hubs(home, settings).address(pipeline.base_model_endpoint)
        try:
            folder = find_base(
                base_model,
                home.bases_dir,
                rows,
                pipeline=pipeline.name,
                seed=pipeline.train.seed,
                endpoint=endpoint,
                token=token,
                has_weights=False,
            ).folder
        except BaseModelAway:
            return None
    if folder is not None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        context = json.loads((folder / "config.json").read_bytes()).get("max_position_embeddings")
    else:
        tokenizer = train_tokenizer(rows)  # as the first job makes it
    return tokenizer, longest_sequence(pipeline.train.max_length, base_model, context)
