"""The pages of datasets: files, rows and commits, and what each commit changed and led to. Each
change by a form is a commit, which is refused if the branch has moved since the page was read."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from typing import Annotated, Any
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Depends, Query
from markdown_it import MarkdownIt
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response

from jobs.spec import full_ref
from pipeline.console import page as pages
from pipeline.console.page import Console, ConsoleOf, Editor, Page, Viewer, Visitor, go, page
from pipeline.doctor.revision import opened, read_rows, rows_between
from pipeline.formats import HEAD
from pipeline.hub import contents
from pipeline.hub.commits import Build, build_commit, build_undo
from pipeline.hub.errors import (
    BadRequest,
    PreconditionFailed,
    RepositoryNotFound,
    RevisionNotFound,
    TooLarge,
)
from pipeline.hub.repositories import Repository, known_heads, read_refs
from pipeline.hub.routes import contents as api
from pipeline.hub.routes.commits import Files, commit_contents
from pipeline.hub.service import Hub, HubOf, check_site
from pipeline.retrain.data import divide, report_on
from pipeline.retrain.editing import ANSWERS_FILE, as_texts, from_texts, record_at, with_row
from pipeline.retrain.settings import DataSettings
from pipeline.settings import PipelineSettings

COMMITS_A_PAGE = 20
ROWS_A_PAGE = 50
MAX_README = 10_000
"""In characters. A longer README is cut: a hostile one takes a second to render, and four times as
long if it is twice as long."""

router = APIRouter(route_class=Page, prefix="/datasets")
_markdown = MarkdownIt("js-default")  # which escapes HTML, and links to no script


@dataclass(frozen=True, kw_only=True)
class Followed:
    """A dataset on this hub, and the pipelines that follow it."""

    repository: Repository
    pipelines: Sequence[PipelineSettings]
    branch: str
    """The one that the first pipeline follows. `url` keeps this pipeline the first."""
    head: str | None

    @property
    def reading(self) -> DataSettings:
        return self.pipelines[0].data if self.pipelines else DataSettings()

    def about(self, revision: str | None) -> Any:
        """The commit, as the API describes it. None if the hub does not have it."""
        with suppress(RevisionNotFound):
            commit = contents.resolve_revision(self.repository, revision or "")
            return contents.list_commits(self.repository, commit, limit=1)[0]
        return None

    def url(self, page: str = "", **query: object) -> str:
        """The address of one of its pages, for the same pipeline."""
        if len(self.pipelines) > 1:
            query["pipeline"] = self.pipelines[0].name
        return f"/{quote(self.repository.name.path)}{page}?{urlencode(query)}"


def followers(console: Console, dataset: str) -> list[PipelineSettings]:
    """The pipelines that follow this dataset of the hub."""
    settings = console.settings
    found = (each for each in settings.pipelines if each.dataset.lower() == dataset.lower())
    return [each for each in found if settings.is_on_own_hub(each)]


def followed(
    hub: HubOf, console: ConsoleOf, owner: str, name: str, pipeline: str | None = None
) -> Followed:
    """`pipeline` is the one whose branch and columns count. Raises RepositoryNotFound."""
    repository = hub.repositories.find(hub.name_of("dataset", f"{owner}/{name}"))
    found = followers(console, repository.name.id)
    found.sort(key=lambda each: each.name != pipeline)
    branch = full_ref(found[0].ref if found else "main")
    head = read_refs(repository).get(branch)
    return Followed(repository=repository, pipelines=found, branch=branch, head=head)


def of_pipeline(hub: Hub, console: Console, pipeline: PipelineSettings) -> Followed | None:
    """The dataset that the pipeline follows. None if it is not on this hub."""
    with suppress(RepositoryNotFound):
        if console.settings.is_on_own_hub(pipeline):
            owner, name = pipeline.dataset.split("/")
            return followed(hub, console, owner, name, pipeline.name)
    return None


FollowedOf = Annotated[Followed, Depends(followed)]


@router.get("")
def list_all(request: Request, hub: HubOf, console: ConsoleOf) -> Response:
    with hub.database.read() as connection:
        heads = known_heads(connection)
    found = [
        (api.described(each, heads.get(each.id)), followers(console, each.name.id))
        for each in sorted(hub.repositories.all(), key=lambda each: each.name.id)
        if each.name.type == "dataset"
    ]
    return page(request, "datasets.html", datasets=found, hub_url=hub.settings.url)


@router.get("/{owner}/{name}")
def show(request: Request, hub: HubOf, dataset: FollowedOf, older: str = "") -> Response:
    """Its commits begin with the newest one, or with those of `older` (with commas between)."""
    repository, head, facts = dataset.repository, dataset.head, dict[str, Any]()
    if head is not None:
        begin = [contents.resolve_revision(repository, each) for each in (older or head).split(",")]
        listed = contents.list_commits(repository, *begin, limit=COMMITS_A_PAGE)
        facts["commits"] = [(each, hub.jobs_store.of_commit(str(each["id"]))) for each in listed]
        facts["older"] = contents.older_commits(repository, *begin, limit=COMMITS_A_PAGE)
        entries = contents.list_tree(repository, head, recursive=True)
        facts["files"] = [each for each in entries if each.type == "file"]
        readme = next((each for each in facts["files"] if each.path == contents.README), None)
        facts["readme"] = readme and _rendered(repository, readme)
    return page(request, "dataset.html", dataset=dataset, hub_url=hub.settings.url, **facts)


@lru_cache(maxsize=32)
def _rendered(repository: Repository, readme: contents.Entry) -> str:
    """The README as HTML."""
    text = HEAD.sub("", contents.read_file(repository, readme).decode(errors="replace"))
    return str(_markdown.render(text[:MAX_README]))


@router.get("/{owner}/{name}/rows")
def show_rows(
    request: Request, dataset: FollowedOf, p: Annotated[int, Query(ge=0, lt=10**6)] = 0
) -> Response:
    """The rows of the newest commit, and what `pipeline data check` says of them."""
    found = read_rows(dataset.repository, dataset.head, dataset.reading)
    divided = divide(found.dataset, dataset.reading)
    report = report_on(found.dataset, *divided, bad=found.bad, elsewhere=found.unread)
    every = [row for rows in found.dataset.by_file.values() for row in rows]
    facts: dict[str, Any] = {"rows": every, "p": p, "a_page": ROWS_A_PAGE, "report": [*report]}
    return page(request, "rows.html", dataset=dataset, **facts)


@router.get("/{owner}/{name}/commit/{sha}")
def show_commit(request: Request, hub: HubOf, dataset: FollowedOf, sha: str) -> Response:
    """What a commit changed, in rows, and what it led to."""
    commit = contents.resolve_revision(dataset.repository, sha)
    parent = _parent(dataset.repository, commit)
    facts: dict[str, Any] = {"commit": dataset.about(commit), "before": dataset.about(parent)}
    facts["change"] = rows_between(dataset.repository, parent, commit, dataset.reading)
    facts["jobs"] = hub.jobs_store.of_commit(commit)
    return page(request, "commit.html", dataset=dataset, **facts)


def _parent(repository: Repository, commit: str) -> str | None:
    [found] = contents.look_up(repository, [f"{commit}^"])
    return found and found[0]


@router.get("/{owner}/{name}/origin/{sha}")
def find_origin(
    dataset: FollowedOf, sha: str, file: str, line: Annotated[int, Query(ge=1)]
) -> Response:
    """Leads to the commit that wrote the row which begins on `line`."""
    commit = contents.resolve_revision(dataset.repository, sha)
    found = contents.commit_of_line(dataset.repository, commit, file, line)
    return go(dataset.url(f"/commit/{found}"))


@router.post("/{owner}/{name}/undo")
async def undo(hub: HubOf, editor: Editor, dataset: FollowedOf) -> Response:
    """Commits the files as they were before the newest commit."""
    head = dataset.head or ""
    about = await run_in_threadpool(dataset.about, head)
    summary = f"Undo {head[:8]}: {about['title'] if about else ''}"
    sha = await commit(hub, editor, dataset, editor.form.get("parent"), summary, {}, build_undo)
    return go(dataset.url(f"/commit/{sha}"))


@router.get("/{owner}/{name}/edit")
def show_form(
    request: Request, dataset: FollowedOf, file: str = ANSWERS_FILE, line: int | None = None
) -> Response:
    """The form for the row that begins on `line`, or for a new row."""
    with opened(dataset.repository, dataset.head, dataset.reading) as (folder, rows):
        rows.check_editable(file)
        record = as_texts(record_at(folder, file, line))
    return page(request, "edit.html", dataset=dataset, file=file, line=line, record=record)


@router.post("/{owner}/{name}/edit")
async def edit(hub: HubOf, editor: Editor, dataset: FollowedOf) -> Response:
    summary, files = await run_in_threadpool(_edited, editor, dataset)
    sha = await commit(hub, editor, dataset, editor.form.get("parent"), summary, files)
    return go(dataset.url(f"/commit/{sha}"))


def _edited(editor: Visitor, dataset: Followed) -> tuple[str, Files]:
    """What was done with the row, and its file. `commit` refuses it if the form is of an older
    commit."""
    form = editor.form
    file, number = form.get("file", ANSWERS_FILE), form.get("line", "")
    line = int(number) if number.isdecimal() else None
    fields = {key[2:]: text for key, text in form.items() if key.startswith("c.")}
    with opened(dataset.repository, dataset.head, dataset.reading) as (folder, rows):
        rows.check_editable(file)
        old = record_at(folder, file, line)
        new = None if "delete" in form else from_texts(fields, old)
        content = with_row(folder, file, line, new)
    verb = "Delete" if new is None else "Edit" if line else "Add"
    texts = " ".join(as_texts(new or old).values())
    return in_short(f"{verb} a row of {file}", texts), {file: BytesIO(content)}


def in_short(done: str, row: str) -> str:
    """The message of a commit that changes a row."""
    return f"{done}: {' '.join(row.split())[:70]}"


@router.post("/{owner}/{name}/upload")
async def upload(request: Request, hub: HubOf, visitor: Viewer, dataset: FollowedOf) -> Response:
    check_site(request.scope)
    visitor.identity.require_write("an upload")
    limit = hub.settings.max_push_bytes  # an upload that does not say its length has too much
    if int(request.headers.get("content-length", limit + 1)) > limit:
        raise TooLarge(f"An upload may have {limit} bytes at most: raise [hub] max_push_bytes.")
    async with request.form() as form:
        texts = {name: text for name, text in form.multi_items() if isinstance(text, str)}
        editor = await pages.editor(visitor, texts)
        sent = [each for each in form.getlist("files") if isinstance(each, UploadFile)]
        files = {each.filename: each.file for each in sent if each.filename}
        if not files:
            raise BadRequest("No file was chosen: choose one, or drop it on the field.")
        summary = texts.get("message") or f"Upload {', '.join(files)}"[:200]
        sha = await commit(hub, editor, dataset, texts.get("parent"), summary, files)
        return go(dataset.url(f"/commit/{sha}"))


async def commit(
    hub: Hub,
    editor: Visitor,
    dataset: Followed,
    parent: str | None,
    summary: str,
    files: Files,
    build: Build = build_commit,
) -> str:
    """Commits the files in the name of the person, on top of the commit that the person has seen
    (`parent`; empty if there was none). Returns the sha. Raises PreconditionFailed if the branch
    has moved since."""
    if parent is None or (parent == "" and dataset.head is not None):
        raise PreconditionFailed("The branch has moved since the page was read: reload the page.")
    name, branch, who = dataset.repository.name, dataset.branch, editor.identity
    return await commit_contents(hub, who, name, branch, parent or None, summary, files, build)
