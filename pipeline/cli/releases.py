"""`pipeline releases`: lists, publishes, checks, pins and removes releases, and makes the server
serve one of them."""

import json
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from jobs.spec import RevisionRange, full_ref
from pipeline.cli.jobs_run import run_to_end
from pipeline.cli.terminal import ChangesStack, JsonOption, PipelineOption, print_table
from pipeline.doctor.facts import counts_text
from pipeline.errors import PipelineError
from pipeline.paths import Home
from pipeline.retrain.job import PROMOTION_DIR, RetrainJob
from pipeline.retrain.run import main
from pipeline.retrain.settings import RetrainSettings
from pipeline.runner.submit import retrain_rule, submit_retraining
from pipeline.runner.this_job import lineage_of_job, pipeline_of_job, spec_of_job
from pipeline.settings import PipelineSettings, load_settings
from pipeline.stack.record import running_settings
from pipeline.stack.serve_release import in_words, release_before, swap_in
from pipeline.stack.services import server_state
from serving.engines.settings import choose_engine
from serving.weights import release_store
from serving.weights.publish import publish_folder
from serving.weights.release import Release
from serving.weights.release_store import (
    list_releases,
    load_release,
    release_ids,
    release_number,
    served_or_empty,
)
from serving.weights.verify import verify_release

app = typer.Typer(help="Manage releases, and choose which one is served.", no_args_is_help=True)

ReleaseArgument = Annotated[str, typer.Argument(help="The id of a release, from `releases ls`.")]
FolderArgument = Annotated[Path, typer.Argument(help="A checkpoint folder, from any trainer.")]
ParentOption = Annotated[
    str | None, typer.Option(help="The release from which the training started.")
]
RevisionOption = Annotated[str | None, typer.Option(help="The dataset commit of the training.")]


@app.command()
def ls(pipeline: PipelineOption = None, as_json: JsonOption = False) -> None:
    """List releases, newest first. `pending` marks a release that was chosen but is not served yet:
    when a server starts next, it will serve this release.

    The column `rows` shows how many changed rows the model has learned, and how many unchanged rows
    it still knows.
    """
    folder = _folder(pipeline)
    marks = release_store.marks(folder)
    rows: list[dict[str, Any]] = [
        {
            "id": release.id,
            **{mark: mark in marks[release.id] for mark in ("served", "pending", "pinned")},
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
    headings = ("release", "", "rows", "dataset revision", "parent", "mode")
    columns = ("dataset_revision", "parent", "mode", "job_id", "created_at")
    print_table(
        (*headings, "job", "created"),
        [
            (
                str(row["id"]),
                " ".join(marks[row["id"]]),
                counts_text(row["evaluation"]) or "-",
                *(str(row[key] or "-") for key in columns),
            )
            for row in rows
        ],
        empty="No release yet.",
    )


@app.command()
def show(
    release: ReleaseArgument, pipeline: PipelineOption = None, as_json: JsonOption = False
) -> None:
    """Print a release's manifest (release.json) as JSON, without the list of tensors and without
    the probe (the texts with which a server checks the release). To standard error, also print its
    counts as one line, such as: learned 58 of 60 · kept 1,187 of 1,200."""
    found = _load(pipeline, release)
    rows = counts_text(found.evaluation)
    if not as_json and rows:
        # A program that reads the JSON from standard output does not see this line.
        print(rows, file=sys.stderr)
    print(found.model_dump_json(indent=2, exclude={"tensors", "probe"}))


@app.command(cls=ChangesStack)
def swap(
    release: ReleaseArgument, pipeline: PipelineOption = None, as_json: JsonOption = False
) -> None:
    """Serve this release. If no server is up, the next server that starts will serve it."""
    name = pipeline or pipeline_of_job(os.environ)
    _swap_in(_configured(name), _load(name, release).id, as_json=as_json)


@app.command(cls=ChangesStack)
def rollback(pipeline: PipelineOption = None, as_json: JsonOption = False) -> None:
    """Serve an older release again.

    The command chooses among the releases that still exist and are older than the served release.
    Its first choice is the release that was served before the served release. Its second choice is
    the parent of the served release (the release from which the training of the served release
    started). Its third choice is the newest of the older releases.

    The next push trains the older release on all rows that changed since its commit. To prevent
    this, revert them in the dataset, or run: pipeline pause NAME
    """
    _swap_in(_configured(pipeline), release_before(_folder(pipeline)), as_json=as_json)


@app.command(cls=ChangesStack)
def publish(
    folder: FolderArgument,
    pipeline: PipelineOption = None,
    parent: ParentOption = None,
    revision: RevisionOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a release from a checkpoint folder: check the folder, copy its files, and write a
    manifest. Weights in `.bin` shards are converted to safetensors. The release is not served yet;
    to serve it, run `releases swap`.

    If the engine is `torch` (the settings say so, or `auto` chooses it on this machine), this
    command refuses a network that the engine cannot serve.

    If a job runs this command, the manifest also names the job, its dataset and its commit; the
    default of --revision is then the job's commit, and that of --parent the served release.
    """
    name = pipeline or pipeline_of_job(os.environ)
    configured = _configured(name)
    target = Home.find().releases_dir / configured.name
    origin = lineage_of_job(os.environ, full_ref(configured.ref))
    if parent is not None:
        _load(name, parent)
    elif origin.job_id is not None:
        parent = served_or_empty(target).release
    revision = revision or origin.dataset_revision
    origin = origin.model_copy(update={"parent": parent, "dataset_revision": revision})
    if choose_engine(load_settings().serving.engine).name == "torch" and find_spec("torch"):
        from serving.engines.torch_engine.staging import check_servable

        check_servable(folder)
    release = publish_folder(target, folder, lineage=origin)
    path = str(target / release.id)
    print(json.dumps({"id": release.id, "path": path}) if as_json else f"{release.id}  {path}")


@app.command(cls=ChangesStack)
def promote(
    folder: FolderArgument,
    pipeline: PipelineOption = None,
    parent: ParentOption = None,
    revision: RevisionOption = None,
) -> None:
    """Judge a checkpoint folder by the rows of the dataset, make a release from it, and serve it.

    The gate judges the weights as it judges those of the built-in retraining. If they cannot be
    judged, because the folder has no tokenizer or the rows have another format, the outcome says so
    and the release is served. This command is the last one of your own trainer: it writes the
    outcome of the job. Outside a job, it runs as a job.

    The default of --revision is the job's commit; outside a job, it is the newest commit. If a
    release other than --parent is chosen by now, the job ends as `superseded`.
    """
    folder, home = folder.absolute(), Home.find()
    if spec_of_job(os.environ) is None:
        settings = running_settings(home)
        command = [sys.executable, "-m", "pipeline", "releases", "promote", str(folder)]
        command += ["--parent", parent] if parent is not None else []
        job_of = settings.pipeline(pipeline).model_copy(update={"command": tuple(command)})
        run_to_end(
            home,
            settings,
            lambda store, hub_url: submit_retraining(
                store, home, settings, hub_url=hub_url, pipeline=job_of, revision=revision
            ),
        )
        return
    configured = _configured(pipeline or pipeline_of_job(os.environ))
    rule = retrain_rule(load_settings(), home, configured)
    origin = lineage_of_job(os.environ, rule.ref)
    sha = revision or origin.dataset_revision
    records = Path(os.environ["JOB_DIR"]) / PROMOTION_DIR
    # The trainer may have promoted another folder before.
    shutil.rmtree(records, ignore_errors=True)
    records.mkdir()
    job = RetrainJob.of(
        os.environ,
        records,
        RetrainSettings.model_validate(rule.spec.settings),
        None
        if sha is None
        else RevisionRange(
            repo=rule.dataset, ref=rule.ref, new_sha=sha, delivery_ids=origin.delivery_ids
        ),
        trained_folder=folder,
        trained_from=parent,
    )
    raise typer.Exit(main(os.environ, lambda _: job))


@app.command()
def verify(
    release: Annotated[
        str | None, typer.Argument(help="The id of a release. Default: every release.")
    ] = None,
    pipeline: PipelineOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check every file of a release against the digests in its manifest. The exit code is 1 if a
    release is damaged."""
    folder = _folder(pipeline)
    faults = {}
    for release_id in [release] if release else release_ids(folder):
        faults[release_id] = verify_release(folder / release_id)
        if not as_json:
            print(f"{release_id}  {'; '.join(faults[release_id]) or 'complete'}")
    if as_json:
        print(json.dumps([{"id": name, "faults": found} for name, found in faults.items()]))
    if any(faults.values()):
        raise typer.Exit(1)


@app.command(cls=ChangesStack)
def prune(
    keep: Annotated[
        int | None, typer.Option(min=0, help="How many to keep. Default: `keep` in the settings.")
    ] = None,
    pipeline: PipelineOption = None,
) -> None:
    """Remove old releases. The served, the pending and the pinned releases always stay."""
    num_kept = keep if keep is not None else load_settings().pipeline(pipeline).keep
    removed = release_store.prune(_folder(pipeline), num_kept)
    print("removed " + (", ".join(removed) or "nothing"))


@app.command(cls=ChangesStack)
def rm(release: ReleaseArgument, pipeline: PipelineOption = None) -> None:
    """Remove a release, damaged or not. You cannot remove a release while it is served, pending
    (chosen, but not served yet) or pinned (kept by `releases pin`)."""
    home = Home.find()
    settings = running_settings(home)
    chosen = settings.pipeline(pipeline)
    release_number(release)
    if server_state(settings.server_url(chosen)).get("release") == release:
        raise PipelineError(
            f"{release} is not removed, because it is served; serve another release first: "
            "pipeline releases rollback"
        )
    release_store.remove(home.releases_dir / chosen.name, release)
    print(f"removed {release}")


@app.command(cls=ChangesStack)
def pin(release: ReleaseArgument, pipeline: PipelineOption = None) -> None:
    """Pin a release: until you unpin it, neither `prune` nor `rm` nor a job removes it."""
    release_store.pin(_folder(pipeline), release)
    print(f"{release} is kept until it is unpinned")


@app.command(cls=ChangesStack)
def unpin(release: ReleaseArgument, pipeline: PipelineOption = None) -> None:
    """Unpin a release. It can then be removed like any other release."""
    release_store.unpin(_folder(pipeline), release)
    print(f"{release} is no longer pinned, so it can be removed like any other release")


def _swap_in(pipeline: PipelineSettings, release: str, *, as_json: bool) -> None:
    """Make the server serve the release, and print the result. If the swap fails, this raises a
    `typer.Exit` with exit code 1. Raises the errors of `swap_in`."""
    home = Home.find()
    settings = running_settings(home)
    pipeline = settings.pipeline(pipeline.name)
    result = swap_in(home, settings, pipeline, release)
    if result is not None:
        print(result.model_dump_json() if as_json else in_words(result))
    elif as_json:
        print(json.dumps({"result": "pending", "release": release}))
    else:
        url = settings.server_url(pipeline)
        print(f"no server is up on {url}; the next server that starts will serve {release}")
    if result is not None and result.result != "live":
        raise typer.Exit(1)


def _configured(pipeline: str | None) -> PipelineSettings:
    return load_settings().pipeline(pipeline)


def _folder(pipeline: str | None) -> Path:
    return Home.find().releases_dir / _configured(pipeline).name


def _load(pipeline: str | None, release_id: str) -> Release:
    release_number(release_id)
    folder = _folder(pipeline) / release_id
    if not folder.exists():
        raise PipelineError(
            f"there is no release {release_id}; `pipeline releases ls` lists all releases"
        )
    return load_release(folder)
