"""The pages of datasets: files, rows and commits, and what each commit changed and led to. Each
change by a form is a commit, which is refused if the branch has moved since the page was read."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from io import SEEK_END, BytesIO
from itertools import chain
from tempfile import TemporaryFile
from typing import IO, Annotated, Any
from urllib.parse import unquote

from fastapi import APIRouter, Depends, Query
from markdown_it import MarkdownIt
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import Response

from pipeline.console.page import (
    Console,
    ConsoleOf,
    Editor,
    Page,
    Viewer,
    Visitor,
    editor,
    go,
    page,
)
from pipeline.doctor.data_check import divided
from pipeline.doctor.revision import opened, parent_of, read_rows, rows_between
from pipeline.formats import HEAD
from pipeline.hub.commits import attributes_files
from pipeline.hub.contents import (
    README,
    Entry,
    large_file_paths,
    list_commits,
    list_tree,
    read_file,
    read_tree,
    resolve_revision,
)
from pipeline.hub.errors import BadRequest, PreconditionFailed
from pipeline.hub.http_json import pieces
from pipeline.hub.large_files import CHUNK_BYTES, LargeFiles
from pipeline.hub.repositories import RefChange, Repository, known_heads, read_refs
from pipeline.hub.routes import commits, contents
from pipeline.hub.service import Hub, HubOf, Remarks, check_site
from pipeline.retrain.data import report_on
from pipeline.retrain.editing import ANSWERS_FILE, record_at, with_row
from pipeline.retrain.settings import DataSettings
from pipeline.settings import PipelineSettings
from receiver.rules import full_ref

COMMITS_A_PAGE = 20
ROWS_A_PAGE = 50
NUM_SHOWN = 200
"""How many files, and how many rows of a difference, a page shows at most."""
MAX_README = 50_000
"""In characters. A longer README is cut, because it takes long to render."""
PageNumber = Annotated[int, Query(ge=0, lt=10**6)]

router = APIRouter(route_class=Page, prefix="/datasets")
_markdown = MarkdownIt("js-default")  # which escapes HTML, and links to no script


@dataclass(frozen=True, kw_only=True)
class Followed:
    """A dataset on this hub, and the pipelines that follow it."""

    repository: Repository
    pipelines: Sequence[PipelineSettings]
    branch: str
    """The one that the first pipeline follows."""
    head: str | None

    @property
    def reading(self) -> DataSettings:
        return self.pipelines[0].data if self.pipelines else DataSettings()

    @property
    def path(self) -> str:
        return f"/{self.repository.name.path}"


def followers(console: Console, dataset: str) -> tuple[PipelineSettings, ...]:
    """The pipelines that follow this dataset of the hub."""
    settings = console.settings
    return tuple(
        each
        for each in settings.pipelines
        if settings.is_on_own_hub(each) and each.dataset.lower() == dataset.lower()
    )


def followed(hub: HubOf, console: ConsoleOf, owner: str, name: str) -> Followed:
    """Raises RepositoryNotFound."""
    dataset = f"{owner}/{name}"
    return follow(hub, dataset, followers(console, dataset))


def follow(hub: Hub, dataset: str, pipelines: Sequence[PipelineSettings]) -> Followed:
    """Raises RepositoryNotFound."""
    repository = hub.repositories.find(hub.name_of("dataset", dataset))
    branch = full_ref(pipelines[0].ref if pipelines else "main")
    head = read_refs(repository).get(branch)
    return Followed(repository=repository, pipelines=pipelines, branch=branch, head=head)


FollowedOf = Annotated[Followed, Depends(followed)]


@router.get("")
def list_all(request: Request, hub: HubOf, console: ConsoleOf) -> Response:
    with hub.database.read() as connection:
        heads = known_heads(connection)
    found = [
        (contents.described(each, heads.get(each.id)), followers(console, each.name.id))
        for each in sorted(hub.repositories.all(), key=lambda each: each.name.id)
        if each.name.type == "dataset"
    ]
    return page(request, "datasets.html", datasets=found, hub_url=hub.settings.url)


@router.get("/{owner}/{name}")
def show(request: Request, hub: HubOf, dataset: FollowedOf, p: PageNumber = 0) -> Response:
    facts: dict[str, Any] = {"files": [], "num_files": 0, "readme": "", "commits": []}
    if dataset.head is not None:
        found = list_tree(dataset.repository, dataset.head, recursive=True)
        files = [each for each in found if each.type == "file"]
        readme = next((each for each in files if each.path == README and not each.lfs), None)
        listed = list_commits(
            dataset.repository, dataset.head, skip=p * COMMITS_A_PAGE, limit=COMMITS_A_PAGE + 1
        )
        made = [(each, hub.jobs_store.of_commit(str(each["id"]))) for each in listed]
        facts |= {"files": files[:NUM_SHOWN], "num_files": len(files), "commits": made}
        facts["readme"] = _rendered(dataset.repository, readme) if readme else ""
    facts |= {"dataset": dataset, "p": p, "a_page": COMMITS_A_PAGE, "hub_url": hub.settings.url}
    return page(request, "dataset.html", **facts)


@lru_cache(maxsize=32)
def _rendered(repository: Repository, readme: Entry) -> str:
    """The README as HTML."""
    text = HEAD.sub("", read_file(repository, readme).decode(errors="replace"))
    return str(_markdown.render(text[:MAX_README]))


@router.get("/{owner}/{name}/raw/{revision}/{path:path}")
def send_file(
    request: Request, _: Viewer, dataset: FollowedOf, revision: str, path: str
) -> Response:
    return contents.resolve(request, dataset.repository, revision, unquote(path))


@router.get("/{owner}/{name}/rows")
def show_rows(
    request: Request, console: ConsoleOf, dataset: FollowedOf, p: PageNumber = 0
) -> Response:
    """The rows of the newest commit, and what `pipeline data check` says of them."""
    facts: dict[str, Any] = {"rows": [], "report": [], "num_rows": 0}
    if dataset.head is not None:
        found = read_rows(dataset.repository, dataset.head, dataset.reading)
        pipeline = next(iter(dataset.pipelines), None)
        rows, held_out = divided(found.dataset, console.home, pipeline)
        report = report_on(found.dataset, rows, held_out, bad=found.bad, elsewhere=found.unread)
        every = list(chain.from_iterable(found.dataset.by_file.values()))
        facts = {"rows": every[p * ROWS_A_PAGE :][:ROWS_A_PAGE], "num_rows": len(every)}
        facts["report"] = list(report)
    return page(request, "rows.html", dataset=dataset, p=p, a_page=ROWS_A_PAGE, **facts)


@router.get("/{owner}/{name}/commit/{sha}")
def show_commit(request: Request, hub: HubOf, dataset: FollowedOf, sha: str) -> Response:
    """What a commit changed, in rows, and what it led to."""
    repository = dataset.repository
    commit = resolve_revision(repository, sha)
    [about] = list_commits(repository, commit, limit=1)
    parent = parent_of(repository, commit)
    change, unread = rows_between(repository, parent, commit, dataset.reading)
    new_of = {new.digest for _, new in change.edited}
    added = [row for row in change.added if row.digest not in new_of]
    facts: dict[str, Any] = {
        "added": added[:NUM_SHOWN],
        "edited": change.edited[:NUM_SHOWN],
        "deleted": change.deleted[:NUM_SHOWN],
        "counts": (len(added), len(change.edited), len(change.deleted)),
        "unread": unread,
        "remarks": _remarks(hub.remarks_on, repository, dataset.branch, parent, commit),
        "jobs": hub.jobs_store.of_commit(commit),
        "is_head": commit == dataset.head,
    }
    return page(request, "commit.html", dataset=dataset, commit=about, **facts)


@lru_cache(maxsize=16)  # the page asks for itself again while a job runs
def _remarks(
    remarks_on: Remarks, repository: Repository, branch: str, old: str | None, new: str
) -> Sequence[str]:
    """What git says after a push of this commit."""
    return remarks_on(repository, {}, [RefChange(ref=branch, old_sha=old, new_sha=new)])


@router.get("/{owner}/{name}/edit")
def show_form(
    request: Request, dataset: FollowedOf, file: str = ANSWERS_FILE, line: int | None = None
) -> Response:
    """The form for a row: with the row that begins on `line`, or empty, with the columns of the
    file's first row."""
    record: Mapping[str, Any] = {"question": "", "answer": ""}
    if dataset.head is not None:
        with opened(dataset.repository, dataset.head, dataset.reading) as (folder, rows):
            lines = [row.line for row in rows.dataset.by_file.get(file, ()) if row.line]
            if line is not None or lines:
                record = record_at(folder, file, line or lines[0])
    fields = {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)
        for name, value in record.items()
    }
    return page(request, "edit.html", dataset=dataset, file=file, line=line, fields=fields)


@router.post("/{owner}/{name}/edit")
async def edit(hub: HubOf, visitor: Editor, dataset: FollowedOf) -> Response:
    form = visitor.form
    file, number = form.get("file", ANSWERS_FILE), form.get("line", "")
    line = int(number) if number.isdecimal() else None
    text, verb = await run_in_threadpool(_edited, dataset, form, file, line)
    files = {file: BytesIO(text.encode())}
    return go(await commit(hub, visitor, dataset, f"{verb} a row of {file}", files))


def _edited(
    dataset: Followed, form: Mapping[str, str], file: str, line: int | None
) -> tuple[str, str]:
    """The new text of the file, and what was done with the row."""
    fields = {key[2:]: text for key, text in form.items() if key.startswith("c.")}
    if dataset.head != (form.get("parent") or None):
        raise moved(dataset)
    if dataset.head is None:
        return json.dumps(fields, ensure_ascii=False) + "\n", "Add"
    with opened(dataset.repository, dataset.head, dataset.reading) as (folder, rows):
        if "delete" in form:
            return with_row(folder, file, line, None), "Delete"
        lines = [row.line for row in rows.dataset.by_file.get(file, ()) if row.line]
        old = record_at(folder, file, line or lines[0]) if line or lines else fields
        record = {name: _value(old.get(name), text, name) for name, text in fields.items()}
        (folder / file).touch()
        return with_row(folder, file, line, record), "Add" if line is None else "Edit"


def _value(old: object, text: str, name: str) -> Any:
    """What a field of the form says, as the kind of value that stands there now."""
    if isinstance(old, str):
        # Browsers end the lines of a form with \r\n.
        return text.replace("\r\n", "\n")
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadRequest(f"{name} must be JSON ({error}): go back and correct it.") from None


@router.post("/{owner}/{name}/upload")
async def upload(request: Request, hub: HubOf, visitor: Viewer, dataset: FollowedOf) -> Response:
    check_site(request.scope)
    visitor.identity.require_write("an upload")
    stream = pieces(request, max_bytes=hub.settings.max_push_bytes)
    try:
        form = await MultiPartParser(request.headers, stream).parse()
    except MultiPartException as error:
        raise BadRequest(f"The form cannot be read: {error}") from None
    try:
        fields = {name: text for name, text in form.multi_items() if isinstance(text, str)}
        files = {
            each.filename: each.file
            for each in form.getlist("files")
            if isinstance(each, UploadFile) and each.filename
        }
        if not files:
            raise BadRequest("No file was chosen: choose one, or drop it on the field.")
        sender = await editor(visitor, fields)
        folder = fields.get("folder", "").strip("/")
        placed = {f"{folder}/{name}" if folder else name: file for name, file in files.items()}
        summary = fields.get("message") or f"Upload {', '.join(placed)}"
        return go(await commit(hub, sender, dataset, summary, placed))
    finally:
        await form.close()


async def commit(
    hub: Hub, sender: Visitor, dataset: Followed, summary: str, files: Mapping[str, IO[bytes]]
) -> str:
    """Commits the files in the name of the person, on top of the commit that the form names as its
    `parent`. Returns the path of the commit's page. Raises PreconditionFailed if the branch is at
    another commit now."""
    if dataset.head != (sender.form.get("parent") or None):
        raise moved(dataset)
    with TemporaryFile(dir=hub.repositories.incoming) as body:
        await run_in_threadpool(_write_body, body, dataset, summary, files)
        sha, *_ = await commits.commit_file(
            hub,
            sender.identity,
            dataset.repository.name,
            dataset.branch,
            body,
            commits.commit_to_branch,
        )
    return f"{dataset.path}/commit/{sha}"


def moved(dataset: Followed) -> PreconditionFailed:
    return PreconditionFailed(
        f"{dataset.branch} of {dataset.repository.name.id} has moved since you opened the page, so "
        f"nothing was changed: it is at {dataset.head or 'no commit'} now. Open the page again."
    )


def _write_body(
    body: IO[bytes], dataset: Followed, summary: str, files: Mapping[str, IO[bytes]]
) -> None:
    """Writes what a client of the API sends (`pipeline/hub/commits.py`). Stores large files."""
    repository, head = dataset.repository, dataset.head
    attributes = attributes_files(read_tree(repository, head))
    tracked = large_file_paths(repository, attributes, files)
    lines: list[Any] = [("header", {"summary": summary[:1000], "parentCommit": head})]
    for path, file in files.items():
        size, sample = file.seek(0, SEEK_END), b""
        file.seek(0)
        sample = file.read(512)
        file.seek(0)
        planned = commits.PlannedFile.model_construct(path=path, size=size, sample=sample)
        if planned.is_large or path in tracked:
            read = iter(partial(file.read, CHUNK_BYTES), b"")
            oid = LargeFiles(repository.folder).store(read, None, size)
            lines.append(("lfsFile", {"path": path, "oid": oid}))
        else:
            content = base64.b64encode(file.read()).decode()
            lines.append(("file", {"path": path, "content": content, "encoding": "base64"}))
    for key, value in lines:
        body.write(json.dumps({"key": key, "value": value}).encode() + b"\n")
