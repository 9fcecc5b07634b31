"""`pipeline releases`: see what can be served, and choose what is."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pipeline.cli.options import JsonOption, PipelineOption
from pipeline.cli.swap import swap_in
from pipeline.cli.tables import print_table
from pipeline.errors import PipelineError
from pipeline.paths import Home

if TYPE_CHECKING:
    from pipeline.settings import PipelineSettings
    from serving.weights.release import Release

app = typer.Typer(help="List, show, swap, roll back, publish and prune.", no_args_is_help=True)

ReleaseArgument = Annotated[str, typer.Argument(help="A release id, as `releases ls` shows it.")]


@app.command()
def ls(pipeline: PipelineOption = None, as_json: JsonOption = False) -> None:
    """List releases, newest first.

    Losses are those of held-out rows, in nats per token; in brackets, what was served before had
    them at. `-` is what was not measured, as where a commit brought no row that could be held out.
    """
    from serving.weights.releases import (
        list_releases,
        pending_release,
        pinned_releases,
        served_release,
    )

    folder = _folder(pipeline)
    served, pending = served_release(folder), pending_release(folder)
    pinned = pinned_releases(folder)
    rows = [
        {
            "id": release.id,
            "served": served is not None and served.name == release.id,
            "pending": pending == release.id,
            "pinned": release.id in pinned,
            "dataset_revision": release.lineage.dataset_revision,
            "parent": release.lineage.parent,
            "mode": release.lineage.mode,
            "job_id": release.lineage.job_id,
            "created_at": release.created_at,
            "evaluation": release.evaluation,
        }
        for release in reversed(list_releases(folder))
    ]
    if as_json:
        print(json.dumps(rows))
        return
    losses = ("loss on new rows (before)", "on known rows (before)")
    headings = ("release", "", *losses, "dataset revision", "parent", "mode")
    columns = ("dataset_revision", "parent", "mode", "job_id", "created_at")
    print_table(
        (*headings, "job", "created"),
        [
            (
                str(row["id"]),
                " ".join(name for name in ("served", "pending", "pinned") if row[name]),
                *_losses(row["evaluation"]),
                *(str(row[key] or "-") for key in columns),
            )
            for row in rows
        ],
        empty="No release yet.",
    )


@app.command()
def show(
    release: ReleaseArgument,
    pipeline: PipelineOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="As it is in any case.")] = False,
) -> None:
    """Print a release's manifest, but for its tensors, as JSON."""
    print(_load(pipeline, release).model_dump_json(indent=2, exclude={"tensors", "probe"}))


@app.command()
def swap(
    release: ReleaseArgument, pipeline: PipelineOption = None, as_json: JsonOption = False
) -> None:
    """Serve this release; without a server, leave it for the next one to start."""
    swap_in(_configured(pipeline), _load(pipeline, release).id, as_json=as_json)


@app.command()
def rollback(pipeline: PipelineOption = None, as_json: JsonOption = False) -> None:
    """Serve what was served before, where that is older; else the release that the served one was
    trained from, or the one before it."""
    from serving.errors import ReleaseError
    from serving.weights.releases import (
        list_releases,
        load_release,
        previous_release,
        release_number,
        served_release,
    )

    folder = _folder(pipeline)
    served = served_release(folder)
    if served is None:
        raise PipelineError("nothing is served yet, so there is nothing to go back from")
    number = release_number(served.name)
    older = [each.id for each in list_releases(folder) if release_number(each.id) < number]
    if not older:
        raise PipelineError(
            f"{served.name} is the oldest release there is; `releases ls` shows all"
        )
    try:
        parent = load_release(served).lineage.parent
    except ReleaseError as error:
        # A damaged release is a reason to go back, and none to stay.
        print(f"pipeline: {error}; going back to the one before it", file=sys.stderr)
        parent = None
    # Never a newer one: going back twice is not going forth.
    choices = (previous_release(folder), parent, older[-1])
    chosen = next(choice for choice in choices if choice in older)
    swap_in(_configured(pipeline), chosen, as_json=as_json)


@app.command()
def publish(
    folder: Annotated[Path, typer.Argument(help="A checkpoint folder of any trainer.")],
    pipeline: PipelineOption = None,
    format: Annotated[
        Literal["safetensors", "bin"] | None,
        typer.Option(help="Write the shards so; by default they stay as they are."),
    ] = None,
    parent: Annotated[
        str | None,
        typer.Option(help="The release it was trained from; in a job, the served one by default."),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(help="The commit whose rows it has seen; in a job, the job's by default."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check a folder, give it a manifest and an id, and keep it among the releases.

    In a job, the manifest names the job and its dataset too.
    """
    from pipeline.lineage import lineage, told_by_job
    from serving.weights.publish import publish_folder
    from serving.weights.releases import served_release

    told = told_by_job(os.environ)
    target = _folder(pipeline or told.pipeline)
    if parent is not None:
        _load(pipeline or told.pipeline, parent)
    served = served_release(target)
    origin = lineage(told, parent=parent, served=served.name if served else None, revision=revision)
    release = publish_folder(target, folder, lineage=origin, format=format)
    path = str(target / release.id)
    print(json.dumps({"id": release.id, "path": path}) if as_json else f"{release.id}  {path}")


@app.command()
def verify(
    release: Annotated[str | None, typer.Argument(help="One; by default all of them.")] = None,
    pipeline: PipelineOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check every byte of a release against its manifest."""
    from serving.weights.releases import release_ids
    from serving.weights.verify import verify_release

    folder = _folder(pipeline)
    faults = {}
    for release_id in [release] if release else release_ids(folder):
        faults[release_id] = verify_release(folder / release_id)
        if not as_json:
            print(f"{release_id}  {'; '.join(faults[release_id]) or 'whole'}")
    if as_json:
        print(json.dumps([{"id": name, "faults": found} for name, found in faults.items()]))
    if any(faults.values()):
        raise typer.Exit(1)


@app.command()
def prune(
    keep: Annotated[int | None, typer.Option(help="By default the pipeline's `keep`.")] = None,
    pipeline: PipelineOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove old releases; never the served one, a pinned one, or one that waits for a server."""
    from pipeline.settings import load_settings
    from serving.weights.releases import prune as prune_releases

    wanted = keep if keep is not None else load_settings().pipeline(pipeline).keep
    removed = prune_releases(_folder(pipeline), wanted)
    if as_json:
        print(json.dumps({"removed": removed}))
    else:
        print("removed " + (", ".join(removed) or "nothing"))


@app.command()
def pin(release: ReleaseArgument, pipeline: PipelineOption = None) -> None:
    """Keep a release whatever its age."""
    from serving.weights.releases import pin as pin_release

    pin_release(_folder(pipeline), release)
    print(f"{release} is kept until it is unpinned")


@app.command()
def unpin(release: ReleaseArgument, pipeline: PipelineOption = None) -> None:
    """Let a release be pruned like any other."""
    from serving.weights.releases import unpin as unpin_release

    unpin_release(_folder(pipeline), release)
    print(f"{release} is pruned when its time comes")


def _losses(evaluation: Any) -> Iterator[str]:
    """On the rows of the new range, and on those known before. What was published by hand may have
    any evaluation, or none."""
    for rows in ("new", "known"):
        found = evaluation.get(rows) if isinstance(evaluation, dict) else None
        told = found if isinstance(found, dict) else {}
        own, before = (
            f"{told[key]:.4f}" if isinstance(told.get(key), float) else None
            for key in ("loss", "served_loss")
        )
        yield "-" if own is None else own if before is None else f"{own} ({before})"


def _configured(pipeline: str | None) -> "PipelineSettings":
    from pipeline.settings import load_settings

    return load_settings().pipeline(pipeline)


def _folder(pipeline: str | None) -> Path:
    return Home.find().releases_dir / _configured(pipeline).name


def _load(pipeline: str | None, release_id: str) -> "Release":
    from serving.weights.releases import load_release, release_number

    release_number(release_id)
    folder = _folder(pipeline) / release_id
    if not folder.exists():
        raise PipelineError(
            f"there is no release {release_id}; `pipeline releases ls` lists those there are"
        )
    return load_release(folder)
