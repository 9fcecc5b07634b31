"""`pipeline releases repair` makes the server serve an undamaged release. `pipeline releases rm`
removes a release."""

from typing import Annotated

import typer

from pipeline.cli.options import PipelineOption
from pipeline.cli.swap import swap_in
from pipeline.errors import PipelineError
from pipeline.paths import Home


def repair(pipeline: PipelineOption = None) -> None:
    """Check every release, and make the server serve an undamaged one.

    If the release that should be served is damaged, the server swaps to the newest undamaged
    release that was served before it. From then on, this older release is the one that should be
    served, as after a rollback.

    When the server starts, it may find the damage itself, and serve that older release as a
    substitute. This command then makes no swap. But if somebody has restored the damaged release
    since then, the server swaps back to the restored release.

    If no server is up, the next server that starts makes the swap.

    This command names the damaged releases, but removes none. If the pending release (chosen, but
    not served yet) is damaged, it is no longer pending. The exit code is 1 if no undamaged release
    was served before the damaged one, or if the swap fails.
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
    undamaged = {release_id for release_id, reasons in faults.items() if not reasons}
    pending = pending_release(folder)
    if pending is not None and pending not in undamaged:
        clear_pending(folder, pending)
        print(f"{pending} is damaged, so it is no longer pending, and no server will swap it in")
    live = live_releases(folder)
    if not live:
        print("no release was served yet, so there is nothing to repair")
        return
    should_be_served = live[-1]
    try:
        served = served_release(folder)
    except ReleaseError as error:
        print(f"`current` does not name a release: {error}")
        served = None
    best = next((each for each in reversed(live) if each in undamaged), None)
    if best is None:
        raise PipelineError(
            f"{should_be_served} is damaged, and no undamaged release was served before it; "
            f"restore the folder of {should_be_served} from a backup, train again with `pipeline "
            "jobs run`, or choose a release from `pipeline releases ls`: pipeline releases swap ID"
        )
    is_substitute = best != should_be_served
    if served is not None and served.name == best:
        instead = f" as a substitute for {should_be_served}" if is_substitute else ""
        print(f"{best} is served{instead}; there is nothing to do")
    else:
        why = (
            f"{should_be_served} is damaged"
            if is_substitute
            else f"{best} is undamaged, but not served"
        )
        print(f"{why}: serving {best}")
        swap_in(chosen, best, as_json=False)
        if is_substitute:
            print(
                f"the next training learns the rows again that only {should_be_served} had "
                "learned; to start it: pipeline jobs run"
            )
    for release_id in sorted(faults.keys() - undamaged):
        print(
            f"{release_id} is damaged, but its folder is kept; to remove it: pipeline releases rm "
            f"{release_id}"
        )


def rm(
    release: Annotated[str, typer.Argument(help="The id of a release, from `releases ls`.")],
    pipeline: PipelineOption = None,
) -> None:
    """Remove a release, damaged or not. You cannot remove a release while it is served, pending
    (chosen, but not served yet) or pinned (kept by `releases pin`)."""
    from pipeline.probes import server_state
    from pipeline.stack_record import running_settings
    from serving.weights.release_removal import remove
    from serving.weights.release_store import release_number

    home = Home.find()
    settings = running_settings(home)
    chosen = settings.pipeline(pipeline)
    release_number(release)
    if server_state(settings.server_url(chosen)).get("release") == release:
        raise PipelineError(
            f"{release} is not removed, because it is served; serve another release first: "
            "pipeline releases rollback"
        )
    remove(home.releases_dir / chosen.name, release)
    print(f"removed {release}")
