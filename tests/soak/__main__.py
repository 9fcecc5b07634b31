"""`python -m tests.soak N`: kills until N processes are dead; what `make soak` runs."""

import argparse
import itertools
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.disk_fixtures import mount, unmount
from tests.soak import checks
from tests.soak.asker import Asker
from tests.soak.faults import OtherReceiver
from tests.soak.rounds import Plan, play
from tests.soak.stack import StackUnderFire
from tests.stack_fixtures import workplace_in

ENOUGH_KILLS = 50
"""For some of them to meet a training behind a checkpoint."""
ENOUGH_ROUNDS = 50
"""For some of them to fill the disk, and for some to have clients that stall."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("kills", type=int, help="how many processes to kill")
    parser.add_argument("--seed", type=int, help="of an earlier soak, to see its rounds again")
    parser.add_argument("--first-round", type=int, default=0, help="begin at this one")
    parser.add_argument("--rounds", type=int, help="at most")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="at most")
    given = parser.parse_args()
    seed = random.randrange(10**6) if given.seed is None else given.seed
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"seed {seed}, in {folder}", flush=True)
    endless = (Plan.of(seed, number) for number in itertools.count(given.first_round))
    plans: Iterable[Plan] = itertools.islice(endless, given.rounds)
    if given.first_round:
        # A later round may damage the served release, or push garbage: older releases must exist.
        plans = itertools.chain([Plan("first", 1, ()), Plan("second", 1, ())], plans)
    soaked = soak(folder, plans, given.kills, given.minutes)
    told = ", ".join(f"{number} {what}" for what, number in soaked.items())
    print(f"{told}; nothing lost (seed {seed})")
    shutil.rmtree(folder)
    return 0


def soak(
    folder: Path, plans: Iterable[Plan], kills: int, minutes: float = float("inf")
) -> Counter[str]:
    """Play the plans on a stack in `folder`, until so many processes were killed or time is up.
    Returns what befell the stack.

    Raises AssertionError where a promise is broken, and where so many kills met no training behind
    a checkpoint, or so many rounds no full disk or no client that stalled, that they prove nothing
    of it. Where a promise is broken, the folder is left as it is, with its disk mounted.
    """
    deadline = time.monotonic() + 60 * minutes
    stack = StackUnderFire(workplace_in(folder))
    soaked = stack.counts
    other: OtherReceiver | None = None
    asker: Asker | None = None
    stack.home.mkdir(parents=True, exist_ok=True)
    if why_not := mount("-t", "tmpfs", "-o", "size=512m", "tmpfs", str(stack.home)):
        print(f"no disk is filled, because none can be mounted: {why_not}", flush=True)
    try:
        stack.ensure_up()
        stack.clone()
        other = OtherReceiver(stack)
        asker = Asker(stack)
        for plan in plans:
            play(stack, plan, lambda line: print(line, flush=True))
            asker.check()
            soaked["rounds"] += 1
            if soaked["kills"] + soaked["stops"] >= kills or time.monotonic() > deadline:
                break
        checks.check_other_receiver(stack, other)
        soaked["suspensions"] = checks.num_logged(stack, "SUSPENDED")
        soaked["deliveries given up"] = checks.num_given_up(stack)
    finally:
        if asker is not None:
            asker.close()
        stack.stop()
        if other is not None:
            other.close()
    checks.check_down(stack)
    if why_not is None:
        unmount(stack.home)
    if soaked["kills"] >= ENOUGH_KILLS:
        assert soaked["resumed trainings"], f"no kill met a training behind a checkpoint: {soaked}"
    if soaked["rounds"] >= ENOUGH_ROUNDS:
        assert soaked["stalled clients"], f"no client stalled: {soaked}"
        assert why_not or soaked["full disks"], f"no disk was filled: {soaked}"
    return soaked


if __name__ == "__main__":
    sys.exit(main())
