"""`pipeline hub`: runs the hub, manages its tokens, removes commits that nothing needs, and purges
a commit that was pushed by mistake."""

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli import services
from pipeline.cli.hub_calls import call_hub
from pipeline.cli.project import project_home
from pipeline.cli.services import HostOption, PortOption
from pipeline.cli.token_commands import app as tokens_app
from pipeline.errors import PipelineError
from pipeline.paths import Home

if TYPE_CHECKING:
    from pipeline.hub.repositories.names import RepositoryName
    from pipeline.traces import ReleaseFolder, Traces

app = typer.Typer(
    help="Run the hub, which has the git repositories and the webhooks. Its default port is 8070.",
    invoke_without_command=True,
)
app.add_typer(tokens_app, name="tokens")


@app.callback()
def hub(context: typer.Context, host: HostOption = None, port: PortOption = None) -> None:
    if context.invoked_subcommand is None:
        services.hub(host, port)


@app.command()
def gc() -> None:
    """Remove each commit that nothing needs, and each large file that no commit names.

    A commit is needed if a branch, a tag or a pull request contains the commit. A commit is also
    needed if a release, an unfinished job or a stored event names this commit or a later commit
    that is based on it. A large file stays for at least an hour after its upload, because its
    commit may come later.

    You can run this command while the hub is up, and also while the hub is down. A push to a
    repository waits while this command works on the repository.
    """
    from pipeline.hub.errors import HubInUse
    from pipeline.hub.repositories.garbage import collect_garbage
    from pipeline.hub.state_folder import stopped_hub
    from pipeline.job_store import open_job_store
    from pipeline.settings import load_settings
    from pipeline.traces import needed_commits

    home, settings = project_home(), load_settings()
    try:
        with open_job_store(settings, home) as store, stopped_hub(home.hub_dir) as (database, all_):
            with database.read() as connection:
                present = [each for each in all_.all(connection) if each.folder.exists()]
            collected = [
                collect_garbage(each, database, lambda: needed_commits(home, store))
                for each in present
            ]
        released = sum(each.num_commits for each in collected)
        large_bytes = sum(each.large_bytes for each in collected)
    except HubInUse:
        answer = call_hub("POST", "gc", None, {}, timeout_seconds=None)
        released, large_bytes = answer["released"], answer["large_bytes"]
    print(
        f"the hub has deleted its own refs to {released} commits that nothing needs, and git has "
        "removed the commits and files to which no ref leads any more"
    )
    if large_bytes:
        print(f"removed {large_bytes / 1e6:,.1f} MB of large files that no commit names")


@app.command()
def purge(
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The repository.")],
    sha: Annotated[str, typer.Argument(help="The commit: all 40 characters of its sha.")],
    type: Annotated[
        str, typer.Option(help="The repository's type: dataset, model or space.")
    ] = "dataset",
    releases: Annotated[
        bool,
        typer.Option(
            "--releases",
            help="Also remove every release that was trained on a removed commit (of a dataset) or "
            "from it (of a base model), every release whose training started from such a release, "
            "and the copies of these releases.",
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove a commit for good. First take it out of every branch, tag and open pull request,
    because this command fails if one of them still contains the commit.

    The command removes the commit, and all later commits that are based on it, from the repository.
    For a dataset, it also removes the copies that jobs downloaded, the rows that jobs stored as
    tokens, and the folders of the jobs that were started for these commits or read them. It
    overwrites the reasons in the outcomes of these jobs, because a reason may quote rows. For a
    model, it also removes the copy that jobs downloaded as their base model.

    Without --releases, the command removes no release, but names the releases that --releases would
    remove. If the command is interrupted, run it again. If the command finds nothing to remove, it
    fails.
    """
    from pipeline.hub.repositories.names import repository_name
    from pipeline.job_store import open_job_store
    from pipeline.settings import load_settings
    from pipeline.traces import find_traces, jobs_in_the_way, remove_traces

    owner, _, short = repository.partition("/")
    name = repository_name(type, owner, short)
    home, settings = project_home(), load_settings()
    planned = _purge("GET", home, name, sha)
    names, commits = planned["names"], planned["commits"]
    with open_job_store(settings, home) as store:
        if waiting := jobs_in_the_way(store, type, names, commits):
            raise PipelineError(
                f"{', '.join(f'{job.id} ({job.state})' for job in waiting)} may still read these "
                "commits; wait until these jobs have ended, or: pipeline jobs cancel ID"
            )
        traces = find_traces(home, store, type, names, commits)
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
    _purge("POST", home, name, sha)
    is_found = planned["is_there"] or traces.job_folders or traces.num_downloads
    if not is_found and not (releases and (traces.releases or traces.later_releases)):
        _print_what_stays(name, traces, releases)
        raise PipelineError(
            f"the {name} does not have the commit {sha}, and neither a job folder nor a download "
            "has it; check the sha, for example with git log. If you have repeated a purge that "
            "was interrupted, the purge is now complete"
        )
    print(f"{sha} is gone from the {name}. Removed: {removed}")
    _print_what_stays(name, traces, releases)


def _purge(method: str, home: Home, name: "RepositoryName", sha: str) -> Any:
    """Returns what a purge of this commit removes from the repository, and the `names` of the
    repository. With the `method` POST, also carries out the purge; with GET, removes nothing. If
    the hub runs, the hub does the work. Otherwise this process does the work."""
    from pipeline.hub.discussions.store import open_refs
    from pipeline.hub.errors import HubInUse
    from pipeline.hub.repositories.purge import plan_purge, purge
    from pipeline.hub.state_folder import stopped_hub

    act = plan_purge if method == "GET" else purge
    try:
        with stopped_hub(home.hub_dir) as (database, repositories):
            with database.read() as connection:
                found = repositories.find(connection, name)
                refs = open_refs(connection, found)
                names = [found.name.id.lower()]
            return {**act(found, sha, refs), "names": names}
    except HubInUse:
        path = f"purge/{name.type}s/{name.id}/{sha}"
        return call_hub(method, path, None, {}, timeout_seconds=None)


def _removed(name: "RepositoryName", planned: Any, traces: "Traces", with_releases: bool) -> str:
    """A list of what the purge removes: for the question before it, and for the last line."""
    parts = [
        f"{len(planned['commits'])} commits"
        if planned["is_there"]
        else "no commits, because none is in the repository"
    ]
    if name.type == "dataset":
        parts += [
            f"{len(traces.job_folders)} job folders",
            "the copies of the dataset that jobs have downloaded",
            "the rows that jobs have stored as tokens",
        ]
    else:
        parts += [str(path) for path in traces.caches]
    if with_releases:
        parts += [_shown(each) for each in (*traces.releases, *traces.later_releases)]
    return "; ".join(parts)


def _shown(each: "ReleaseFolder") -> str:
    release = f"release {each.release.id} of {each.path.parent.name}"
    return f"{each.path} (a copy of {release})" if each.is_copy else release


def _remove_releases(traces: "Traces") -> None:
    from serving.weights.release_removal import check_removable, remove, remove_replaced
    from serving.weights.release_store import release_number

    found = (*traces.releases, *traces.later_releases)
    for each in found:
        if not each.is_copy:
            check_removable(each.path.parent, each.path.name)
    # Remove the newest first. A later release is found by its parent, so if this command is
    # interrupted, the next one still finds all that remains.
    for each in sorted(found, key=lambda each: release_number(each.release.id), reverse=True):
        if each.is_copy:
            remove_replaced(each.path)
        else:
            remove(each.path.parent, each.path.name)


def _print_what_stays(name: "RepositoryName", traces: "Traces", with_releases: bool) -> None:
    if not with_releases:
        _print_releases(name, traces)
    for path in traces.unreadable:
        print(
            f"{path} stays, because its manifest cannot be read. So nobody knows whether it was "
            f"{_trained_on(name)}. To remove it: rm -r {shlex.quote(str(path))}"
        )


def _trained_on(name: "RepositoryName") -> str:
    return f"trained {'from' if name.type == 'model' else 'on'} a removed commit"


def _print_releases(name: "RepositoryName", traces: "Traces") -> None:
    for words, found in (
        (f"was {_trained_on(name)}", traces.releases),
        ("was trained from the weights of such a release", traces.later_releases),
    ):
        for each in found:
            remove = f"; to remove it: rm -r {shlex.quote(str(each.path))}" if each.is_copy else ""
            print(f"{_shown(each)} {words}{remove}")
    if traces.releases or traces.later_releases:
        print(
            "To remove such a release: pipeline releases rm ID. A served, pending or pinned "
            "release cannot be removed. If the release is served, first train without the commit, "
            "or run: pipeline releases rollback"
        )
