"""`pipeline releases repair` and `pipeline releases rm`: what to do about damaged releases."""

from typing import Annotated

import typer

from pipeline.cli.options import PipelineOption
from pipeline.cli.swap import swap_in
from pipeline.errors import PipelineError
from pipeline.paths import Home


def repair(pipeline: PipelineOption = None) -> None:
    """Check every release, and serve a whole one.

    If the served release is damaged, the newest whole release that was live before it is served in
    its place. If a release that was damaged is whole again, it is served again. This removes no
    release: it names the damaged ones. The exit code is 1 if no whole release is left to serve.
    """
    from pipeline.settings import load_settings
    from serving.errors import ReleaseError
    from serving.weights.release_store import (
        clear_pending,
        live_releases,
        pending_release,
        release_ids,
        served_release,
    )
    from serving.weights.verify import verify_release

    chosen = load_settings().pipeline(pipeline)
    folder = Home.find().releases_dir / chosen.name
    faults = {each: verify_release(folder / each) for each in release_ids(folder)}
    for release_id, reasons in faults.items():
        print(f"{release_id}  {'; '.join(reasons) or 'complete'}")
    whole = {release_id for release_id, reasons in faults.items() if not reasons}
    pending = pending_release(folder)
    if pending is not None and pending not in whole:
        clear_pending(folder, pending)
        print(f"{pending} was pending, and is damaged; no server will swap it in")
    live = live_releases(folder)
    if not live:
        print("no release was live yet, so there is nothing to repair")
        return
    try:
        served = served_release(folder)
    except ReleaseError as error:
        print(f"`current` cannot be read: {error}")
        served = None
    best = next((each for each in reversed(live) if each in whole), None)
    if best is None:
        raise PipelineError(
            f"{live[-1]} is damaged, and no other release that was live is whole; restore the "
            "release's folder from a backup, train again with `pipeline jobs run`, or choose a "
            "release from `pipeline releases ls`: pipeline releases swap ID"
        )
    if served is not None and served.name == best:
        told = f", and stands in for {live[-1]}" if live[-1] != best else ""
        print(f"{best} is served{told}; there is nothing to do")
    else:
        why = f"{live[-1]} is damaged" if best != live[-1] else f"{best} is whole again"
        print(f"{why}: serving {best}")
        swap_in(chosen, best, as_json=False)
        if best != live[-1]:
            print(
                "the next training learns the rows of the damaged release again: pipeline jobs run"
            )
    for release_id in sorted(faults.keys() - whole):
        print(f"{release_id} stays as it is; to remove it: pipeline releases rm {release_id}")


def rm(
    release: Annotated[str, typer.Argument(help="The id of a release, from `releases ls`.")],
    pipeline: PipelineOption = None,
) -> None:
    """Remove a release, whole or damaged, but never the served, the pending or a pinned one."""
    from pipeline.probes import server_state
    from pipeline.stack_record import running_settings
    from serving.weights.release_store import release_number, remove

    home = Home.find()
    settings = running_settings(home)
    chosen = settings.pipeline(pipeline)
    release_number(release)
    if server_state(settings.server_url(chosen)).get("release") == release:
        raise PipelineError(
            f"{release} is not removed, because it is served; first serve another one: pipeline "
            "releases rollback"
        )
    remove(home.releases_dir / chosen.name, release)
    print(f"removed {release}")
