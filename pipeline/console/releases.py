"""The pages of releases: which came from which, what each has learned, what was served when."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import unquote

from fastapi import APIRouter, Depends, Query
from sqlalchemy import select
from starlette.requests import Request
from starlette.responses import Response

from jobs.counts import counts_in
from jobs.errors import JobNotFound
from pipeline.console.datasets import NUM_SHOWN, follow
from pipeline.console.page import ConsoleOf, Editor, Page, Viewer, go, page
from pipeline.doctor.revision import rows_between
from pipeline.errors import PipelineError
from pipeline.hub.contents import resolve_revision
from pipeline.hub.database import events
from pipeline.hub.errors import NotFound, RequestError
from pipeline.hub.releases import refresh
from pipeline.hub.repositories import known_refs
from pipeline.hub.routes import contents
from pipeline.hub.service import Hub, HubOf
from pipeline.runner.serve_release import in_words, release_before, swap_in
from pipeline.settings import PipelineSettings
from pipeline.stack.record import at_running_stack
from receiver.rules import DEFAULT_BRANCH
from serving.weights import release_store
from serving.weights.release import Release
from serving.weights.release_store import list_releases, load_release, readable_served

NUM_EVENTS = 100
"""How many changes of a model repository are looked at, to see what was served when."""
LOSSES = {"new": "changed rows", "known": "unchanged rows", "held_out": "held-out rows"}

router = APIRouter(route_class=Page, prefix="/releases")


@dataclass(frozen=True, kw_only=True)
class Place:
    """A pipeline and the folder of its releases."""

    pipeline: PipelineSettings
    folder: Path

    def release(self, release_id: str) -> Release:
        """Raises NotFound, and ReleaseError if the release is damaged."""
        if release_id not in release_store.release_ids(self.folder):
            raise NotFound(f"{self.pipeline.name} has no release {release_id}: it may be removed.")
        return load_release(self.folder / release_id)

    def marks(self) -> dict[str, list[str]]:
        """What is to be said of some releases, by their ids."""
        served = readable_served(self.folder)
        found: dict[str, list[str]] = {}
        for mark, ids in (
            ("served", [served.release]),
            ("pending", [served.pending]),
            ("pinned", release_store.pinned_releases(self.folder)),
        ):
            for each in filter(None, ids):
                found.setdefault(each, []).append(mark)
        return found


def place_of(console: ConsoleOf, pipeline: str) -> Place:
    """Raises PipelineError if there is no such pipeline."""
    found = console.settings.pipeline(pipeline)
    return Place(pipeline=found, folder=console.home.releases_dir / found.name)


PlaceOf = Annotated[Place, Depends(place_of)]
Beside = Annotated[str | None, Query(alias="with")]


@router.get("")
def list_all(request: Request, hub: HubOf, console: ConsoleOf) -> Response:
    listed = []
    for pipeline in console.settings.pipelines:
        place = place_of(console, pipeline.name)
        found = list_releases(place.folder)
        rows = [(each, str(counts_in(each.evaluation))) for each in reversed(found)]
        facts = {"name": pipeline.name, "marks": place.marks(), "graph": _graph(found)}
        listed.append(facts | {"releases": rows, "served": list(_served(hub, pipeline.name))})
    return page(request, "releases.html", pipelines=listed)


def _graph(releases: Sequence[Release]) -> list[tuple[str, int, tuple[int, int] | None]]:
    """Of each release, oldest first: its id, its column, and the column and number of its parent. A
    release stands below its parent, unless another one does already."""
    found: dict[str, tuple[int, int]] = {}
    columns_below: set[str] = set()
    drawn = []
    for number, release in enumerate(releases):
        parent = release.lineage.parent
        above = found.get(parent) if parent is not None else None
        if above is not None and parent not in columns_below:
            column = above[0]
        else:
            column = 1 + max((column for column, _ in found.values()), default=-1)
        columns_below.add(parent or "")
        found[release.id] = column, number
        drawn.append((release.id, column, above))
    return drawn


def _served(hub: Hub, pipeline: str) -> Iterator[tuple[float, str]]:
    """When the pipeline's model repository was moved to which release, newest first."""
    with suppress(RequestError):
        repository = hub.repositories.find(hub.releases.name(pipeline))
        moves = select(events.c.created_at, events.c.updated_refs).where(
            events.c.repository_id == repository.id
        )
        with hub.database.read() as connection:
            refs = known_refs(connection, repository)
            rows = connection.execute(moves.order_by(events.c.seq.desc()).limit(NUM_EVENTS)).all()
        names = {sha: ref.removeprefix("refs/tags/") for ref, sha in refs.items()}
        for row in rows:
            for change in row.updated_refs:
                if change["ref"] == DEFAULT_BRANCH and change["new_sha"] is not None:
                    yield row.created_at, names.get(change["new_sha"], "a release that is removed")


@router.get("/{pipeline}/{release_id}")
def show(
    request: Request, hub: HubOf, place: PlaceOf, release_id: str, beside: Beside = None
) -> Response:
    """One release; with `with`, next to another one."""
    release = place.release(release_id)
    other = place.release(beside) if beside else None
    facts, others = _facts(hub, release), _facts(hub, other) if other is not None else {}
    return page(
        request,
        "release.html",
        pipeline=place.pipeline.name,
        release=release,
        other=other,
        facts=[(name, facts.get(name), others.get(name)) for name in {**facts, **others}],
        difference=_difference(hub, place.pipeline, release, other) if other is not None else None,
        marks=place.marks(),
        ids=[each for each in release_store.release_ids(place.folder) if each != release_id],
        repository=hub.releases.name(place.pipeline.name).id,
        most=NUM_SHOWN,
    )


def _facts(hub: Hub, release: Release) -> dict[str, str]:
    """What is known of a release, in words."""
    evaluation = release.evaluation or {}
    facts: dict[str, Any] = {"created": release.created_at}
    facts |= release.lineage.model_dump(exclude={"delivery_ids", "rows"})
    facts |= {"rows": ", ".join(release.lineage.rows), "counts": counts_in(evaluation)}
    for group, rows in LOSSES.items():
        found = evaluation.get(group) or {}
        if found.get("loss") is not None:
            before = f"{found['served_loss']:.3f} → " if found["served_loss"] is not None else ""
            facts[f"loss on {rows}"] = f"{before}{found['loss']:.3f} nats per token"
    facts["not learned"] = evaluation.get("not_learned")
    with suppress(JobNotFound):
        settings = hub.jobs_store.get(release.lineage.job_id or "").spec.settings or {}
        for table in ("data", "train", "gate"):
            for key, value in settings.get(table, {}).items():
                facts[f"{table}.{key}"] = value
    return {name.replace("_", " "): str(fact) for name, fact in facts.items() if fact is not None}


def _difference(
    hub: Hub, pipeline: PipelineSettings, release: Release, other: Release
) -> Mapping[str, Any]:
    """The rows that separate the commits of two releases, or why nobody knows them."""
    old, new = (each.lineage.dataset_revision or "unknown" for each in (other, release))
    try:
        repository = follow(hub, pipeline.dataset, [pipeline]).repository
        shas = (resolve_revision(repository, each) for each in (old, new))
        change, _ = rows_between(repository, *shas, pipeline.data)
    except PipelineError as error:
        return {"unknown": str(error)}
    return {"change": change}


@router.get("/{pipeline}/{release_id}/files/{path:path}")
async def send_file(
    request: Request, hub: HubOf, _: Viewer, place: PlaceOf, release_id: str, path: str
) -> Response:
    name = hub.releases.name(place.pipeline.name)
    await refresh(hub.releases, name)
    return contents.resolve(request, hub.repositories.find(name), release_id, unquote(path))


@router.post("/{pipeline}/{act}")
def change(
    console: ConsoleOf,
    visitor: Editor,
    place: PlaceOf,
    act: Literal["swap", "rollback", "pin", "unpin"],
) -> Response:
    if act == "rollback":
        chosen = release_before(place.folder)
    else:
        chosen = place.release(visitor.form.get("release", "")).id
    if act in ("pin", "unpin"):
        (release_store.pin if act == "pin" else release_store.unpin)(place.folder, chosen)
    else:
        settings = at_running_stack(console.settings, console.home)
        pipeline = settings.pipeline(place.pipeline.name)
        result = swap_in(console.home, settings, pipeline, chosen)
        if result is not None and result.result != "live":
            raise PipelineError(in_words(result))
    return go(f"/releases/{place.pipeline.name}/{chosen}")
