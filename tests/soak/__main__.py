"""`python -m tests.soak N`: kills until N processes are dead; what `make soak` runs."""

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.soak import checks
from tests.soak.rounds import play
from tests.soak.stack import StackUnderFire
from tests.stack_fixtures import workplace_in


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("kills", type=int, help="how many processes to kill")
    parser.add_argument("--seed", type=int, help="of an earlier soak, to see its rounds again")
    parser.add_argument("--first-round", type=int, default=0, help="begin at this one")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="at most")
    given = parser.parse_args()
    seed = random.randrange(10**6) if given.seed is None else given.seed
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"seed {seed}, in {folder}", flush=True)
    num_kills, number = soak(folder, seed, given.kills, given.first_round, given.minutes)
    print(f"{num_kills} kills in {number} rounds, nothing lost (seed {seed})")
    shutil.rmtree(folder)
    return 0


def soak(
    folder: Path, seed: int, kills: int, first_round: int = 0, minutes: float = float("inf")
) -> tuple[int, int]:
    """Kill so many processes of a stack in `folder`, or until the minutes are over.

    Returns the numbers of kills and of rounds. Raises AssertionError where a promise is broken;
    the folder is left as it is then.
    """
    deadline = time.monotonic() + 60 * minutes
    stack = StackUnderFire(workplace_in(folder))
    num_kills, number = 0, first_round
    try:
        stack.ensure_up()
        stack.clone()
        while num_kills < kills and time.monotonic() < deadline:
            num_kills += play(stack, seed, number, lambda line: print(line, flush=True))
            number += 1
    finally:
        stack.stop()
    checks.check_down(stack)
    return num_kills, number - first_round


if __name__ == "__main__":
    sys.exit(main())
