"""The pages of releases: which came from which, what each has learned, what was served when."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from jobs.errors import JobNotFound
from pipeline.console.datasets import Followed, of_pipeline
from pipeline.console.page import Console, ConsoleOf, Editor, Page, go, page
from pipeline.doctor.facts import counts_text, wrong_answers
from pipeline.doctor.revision import rows_between
from pipeline.errors import PipelineError
from pipeline.hub.errors import NotFound
from pipeline.hub.releases import refresh, served_when
from pipeline.hub.service import Hub, HubOf
from pipeline.settings import PipelineSettings
from pipeline.stack.record import at_running_stack
from pipeline.stack.serve_release import in_words, release_before, swap_in
from serving.errors import ReleaseError
from serving.weights import release_store
from serving.weights.release import Release


async def refreshed(hub: HubOf, console: ConsoleOf) -> None:
    """The hub knows all releases when this returns."""
    for pipeline in console.settings.pipelines:
        await refresh(hub.releases, hub.releases.name(pipeline.name))


def folder_of(console: ConsoleOf, pipeline: str) -> Path:
    """The folder of the pipeline's releases. Raises PipelineError if there is no such pipeline."""
    return console.home.releases_dir / console.settings.pipeline(pipeline).name


FolderOf = Annotated[Path, Depends(folder_of)]
Beside = Annotated[str, Query(alias="with")]
Act = Literal["swap", "pin", "unpin"]

router = APIRouter(route_class=Page, prefix="/releases", dependencies=[Depends(refreshed)])


@router.get("")
def list_all(request: Request, hub: HubOf, console: ConsoleOf) -> Response:
    found = [_of(hub, console, each) for each in console.settings.pipelines]
    return page(request, "releases.html", pipelines=found)


def _of(hub: Hub, console: Console, pipeline: PipelineSettings) -> dict[str, Any]:
    folder, dataset = folder_of(console, pipeline.name), of_pipeline(hub, console, pipeline)
    return {
        "name": folder.name,
        "dataset": dataset,
        "releases": release_store.list_releases(folder),
        "marks": release_store.marks(folder),
        "back": way_back(dataset, folder),
        "served": served_when(hub.releases, folder.name),
    }


def way_back(dataset: Followed | None, folder: Path) -> tuple[Release, Any] | None:
    """The release that a rollback serves, and the commit that it learned. None if there is none."""
    with suppress(PipelineError, ReleaseError):
        release = release_store.load_release(folder / release_before(folder))
        return release, dataset and dataset.about(release.lineage.dataset_revision)
    return None


@router.get("/{pipeline}/{id}")
def show(
    request: Request, hub: HubOf, console: ConsoleOf, folder: FolderOf, id: str, beside: Beside = ""
) -> Response:
    """One release; with `with`, next to another one."""
    release = _release(folder, id)
    dataset = of_pipeline(hub, console, console.settings.pipeline(folder.name))
    facts: dict[str, Any] = {"release": release, "this": _facts(hub, release), "beside": beside}
    if beside:
        other = _release(folder, beside)
        facts["that"] = _facts(hub, other)
        before, after = (each.lineage.dataset_revision or "unknown" for each in (other, release))
        try:
            if dataset is None:
                raise NotFound("their dataset is not on this hub")
            facts["change"] = rows_between(dataset.repository, before, after, dataset.reading)
        except PipelineError as error:
            facts["unknown"] = str(error)
    facts |= {"ids": release_store.release_ids(folder), "marks": release_store.marks(folder)[id]}
    name = hub.releases.name(folder.name)
    return page(request, "release.html", pipeline=name, dataset=dataset, **facts)


def _release(folder: Path, release_id: str) -> Release:
    """Raises NotFound, and ReleaseError if the release is damaged."""
    if release_id not in release_store.release_ids(folder):
        raise NotFound(f"{folder.name} has no release {release_id!r}: it may have been removed.")
    return release_store.load_release(folder / release_id)


def _facts(hub: Hub, release: Release) -> dict[str, Any]:
    """What is known of a release: its manifest and the settings of its job."""
    hidden = {"tensors", "probe", "files", "tied", "format"}
    known = {"counts": counts_text(release.evaluation), **release.model_dump(exclude=hidden)}
    with suppress(JobNotFound):
        job = hub.jobs_store.get(release.lineage.job_id or "")
        known |= {"settings": job.spec.settings, "wrong": wrong_answers(hub.jobs_dir / job.id)}
    return known


@router.post("/{pipeline}/{act}")
def change(console: ConsoleOf, editor: Editor, folder: FolderOf, act: Act) -> Response:
    chosen = _release(folder, editor.form.get("release", "")).id
    if act == "pin":
        release_store.pin(folder, chosen)
    elif act == "unpin":
        release_store.unpin(folder, chosen)
    else:
        settings = at_running_stack(console.settings, console.home)
        result = swap_in(console.home, settings, settings.pipeline(folder.name), chosen)
        if result is not None and result.result != "live":
            raise PipelineError(in_words(result))
    return go(f"/releases/{folder.name}/{chosen}")
