"""`pipeline hub`: runs the hub, manages its tokens, removes commits that nothing needs, and purges
a commit that was pushed by mistake."""

import json
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.cli.terminal import ChangesStack, JsonOption, print_table, project_home
from pipeline.cli.webhooks import on_hub
from pipeline.errors import PipelineError
from pipeline.hub.repositories import RepositoryName, repository_name
from pipeline.hub.routes.administration import check_name
from pipeline.logs import log_to_stderr
from pipeline.paths import Home
from pipeline.runner.job_store import open_job_store
from pipeline.settings import load_settings
from pipeline.tokens import load_tokens
from pipeline.traces import Traces, find_traces, jobs_in_the_way, needed_commits, remove_traces
from serving.weights.release_store import check_removable, release_number, remove

app = typer.Typer(
    help="Run the hub, which has the git repositories and the webhooks. Its default port is 8070.",
    invoke_without_command=True,
)
tokens = typer.Typer(help="Manage tokens for other people and programs.", no_args_is_help=True)
app.add_typer(tokens, name="tokens")

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The name of the token.")]


@app.callback()
def hub(context: typer.Context) -> None:
    if context.invoked_subcommand is not None:
        return
    from pipeline.console.app import create_router
    from pipeline.console.page import Console
    from pipeline.doctor.revision import PushRemarks
    from pipeline.hub.app import create_app, serve
    from pipeline.runner.elsewhere import jobs_elsewhere
    from pipeline.stack.push_to import pushing

    home, settings = Home.find(), load_settings()
    log_to_stderr(settings.logs, "hub")
    tokens = load_tokens(home.tokens_file)
    with open_job_store(settings, home) as store:
        app = create_app(
            settings.hub,
            home.hub_dir,
            token=tokens.hub,
            secret_key=tokens.key.encode(),
            jobs_store=store,
            jobs_dir=home.jobs_dir,
            elsewhere=jobs_elsewhere(settings, home, tokens),
            needed_commits=partial(needed_commits, home, store),
            remarks_on=PushRemarks(
                [each for each in settings.pipelines if settings.is_on_own_hub(each)]
            ),
            datasets=settings.datasets_on_hub,
            pipeline_dirs={each.name: home.releases_dir / each.name for each in settings.pipelines},
            console=create_router(Console(home=home, settings=settings)),
        )
        with pushing(settings, home):
            serve(app, settings.hub)


@app.command(cls=ChangesStack)
def gc() -> None:
    """Remove each commit that nothing needs, and each large file that no commit names.

    A commit is needed if a branch, a tag or a pull request contains the commit. A commit is also
    needed if a release, an unfinished job or a stored event names this commit or a later commit
    that is based on it. A large file stays for at least an hour after its upload, because its
    commit may come later.

    The hub must be up. A push to a repository waits while this command works on the repository.
    """
    removed = on_hub("POST", "gc")
    print(f"removed {removed['released']:,} commits that nothing needs, and their git objects")
    if large_bytes := removed["large_bytes"]:
        print(f"removed {large_bytes / 1e6:,.1f} MB of large files that no commit names")


@app.command(cls=ChangesStack)
def purge(
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The repository.")],
    sha: Annotated[str, typer.Argument(help="The commit: all 40 characters of its sha.")],
    type: Annotated[
        str, typer.Option(help="The repository's type: dataset, model or space.")
    ] = "dataset",
    releases: Annotated[
        bool,
        typer.Option(
            "--releases", help="Also remove the releases that were trained on a removed commit."
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove a commit for good. First take it out of every branch, tag and open pull request,
    because this command fails if one of them still contains the commit. The hub must be up.

    The command removes the commit, and all later commits that are based on it, from the repository.
    For a dataset, it also removes the copies that jobs downloaded, and the folders of the jobs that
    were started for these commits or read them. It overwrites the reasons in the outcomes of these
    jobs, because a reason may quote rows. For a model, it also removes the copy that jobs
    downloaded as their base model.

    With --releases, the command also removes every release that was trained on a removed commit (of
    a dataset) or from it (of a base model), and every release whose training started from such a
    release. Without it, the command removes no release, but names these releases. If the command is
    interrupted, run it again. If the command finds nothing to remove, it fails.
    """
    owner, _, short = repository.partition("/")
    name = repository_name(type, owner, short)
    home, settings = project_home(), load_settings()
    path = f"purge/{name.type}s/{name.id}/{sha}"
    planned = on_hub("GET", path)
    commits = planned["commits"]
    with open_job_store(settings, home) as store:
        if waiting := jobs_in_the_way(store, type, name.id.lower(), commits):
            raise PipelineError(
                f"{', '.join(f'{job.id} ({job.state})' for job in waiting)} may still read these "
                "commits; wait until these jobs have ended, or: pipeline jobs cancel ID"
            )
        traces = find_traces(home, store, type, name.id.lower(), commits)
        removed = _removed(name, planned, traces, releases)
        if not yes:
            question = f"A purge of {sha} removes for good: {removed}. Purge the {name}?"
            typer.confirm(question, abort=True)
        if releases:
            # Remove the releases before anything else. If one of these releases is served, pending
            # or pinned, `_remove_releases` raises an error, and this command removes nothing.
            _remove_releases(traces)
        remove_traces(home, traces, store)
    # Remove the commits from the repository last. If this command is interrupted earlier, a second
    # run still finds the commits in the repository, and so can finish the work. Do this even if the
    # repository does not have the commit: an interrupted purge may have left some of its files.
    on_hub("POST", path)
    is_found = planned["is_there"] or traces.job_folders or traces.num_downloads
    if not is_found and not (releases and traces.releases):
        _print_what_stays(name, traces, releases)
        raise PipelineError(
            f"the {name} does not have the commit {sha}, and neither a job folder nor a download "
            "has it; check the sha, for example with git log. If you have repeated a purge that "
            "was interrupted, the purge is now complete"
        )
    print(f"{sha} is gone from the {name}. Removed: {removed}")
    _print_what_stays(name, traces, releases)


def _removed(name: RepositoryName, planned: Any, traces: Traces, with_releases: bool) -> str:
    """A list of what the purge removes: for the question before it, and for the last line."""
    parts = ["no commits, because none is in the repository"]
    if planned["is_there"]:
        parts = [f"{len(planned['commits'])} commits"]
    if name.type == "dataset":
        parts.append(f"{len(traces.job_folders)} job folders")
        parts.append("the copies of the dataset that jobs have downloaded")
    else:
        parts += map(str, traces.caches)
    if with_releases:
        parts += map(_told, traces.releases)
    return "; ".join(parts)


def _told(release: Path) -> str:
    return f"release {release.name} of {release.parent.name}"


def _remove_releases(traces: Traces) -> None:
    for path in traces.releases:
        check_removable(path.parent, path.name)
    # Remove the newest first. A later release is found by its parent, so if this command is
    # interrupted, the next one still finds all that remains.
    for path in sorted(traces.releases, key=lambda path: release_number(path.name), reverse=True):
        remove(path.parent, path.name)


def _print_what_stays(name: RepositoryName, traces: Traces, with_releases: bool) -> None:
    trained = f"trained {'from' if name.type == 'model' else 'on'} a removed commit"
    for path in traces.unreadable:
        print(
            f"{path} stays, because its manifest cannot be read. So nobody knows whether it was "
            f"{trained}. To remove it: rm -r {shlex.quote(str(path))}"
        )
    if with_releases or not traces.releases:
        return
    for path in traces.releases:
        print(f"{_told(path)} was {trained}, or from the weights of such a release")
    print(
        "To remove such a release: pipeline releases rm ID. A served, pending or pinned release "
        "cannot be removed. If the release is served, first train without the commit, or run: "
        "pipeline releases rollback"
    )


@tokens.command(cls=ChangesStack)
def create(
    name: NameArgument,
    role: Annotated[
        str, typer.Option(help="What the token allows: read, or write (which includes read).")
    ] = "read",
) -> None:
    """Create a token and print it. The hub stores only the token's hash, so the token cannot be
    shown again.
    """
    check_name(name)
    made = on_hub("POST", f"tokens/{name}", {"role": role})
    print(made["token"])
    print("Store the token now: it cannot be shown again.", file=sys.stderr)


@tokens.command(name="ls")
def list_(as_json: JsonOption = False) -> None:
    """List the tokens: their names, what they may do, and when they were created."""
    found = on_hub("GET", "tokens")
    if as_json:
        print(json.dumps(found, indent=2))
        return
    rows = [(each["name"], each["role"], each["createdAt"][:16]) for each in found]
    headings = ("NAME", "ROLE", "CREATED")
    print_table(headings, rows, empty="No token yet; create one: pipeline hub tokens create NAME")


@tokens.command(cls=ChangesStack)
def revoke(name: NameArgument) -> None:
    """Revoke a token. The hub refuses every later request that has this token."""
    check_name(name)
    on_hub("DELETE", f"tokens/{name}")
    print(f"revoked {name}")
