"""`python -m pipeline.retrain [NODES PROCESSES]`: the command of a retraining job. It writes
`outcome.json`, even if the job fails. With the two numbers, it runs the job in so many processes on
each of so many machines."""

import faulthandler
import os
import sys

from jobs.process import die_with_parent
from pipeline.retrain.run import main


def _main() -> int:
    faulthandler.enable()  # if a library crashes, the job's log says where
    # A job without anything to learn needs no torch, so import it only here.
    if len(sys.argv) > 1:
        from pipeline.retrain.processes import start

        return start(*map(int, sys.argv[1:]))
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun has started this process
        # A task of Ray may be killed, and nobody else ends what it has started.
        die_with_parent(int(os.environ["TORCHRUN_PID"]))
        from pipeline.retrain.processes import run_part
        from pipeline.retrain.train import help_to_train

        run_part(main, help_to_train)
    return main()


if __name__ == "__main__":
    sys.exit(_main())
