"""`python -m pipeline.retrain`: the command of a retraining job. It writes `outcome.json`, even if
the job fails."""

import sys

from pipeline.retrain.run import main

if __name__ == "__main__":
    sys.exit(main())
