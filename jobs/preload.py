"""The fork server imports this module, which imports the modules that the variable `PRELOAD` names.
A module that cannot be imported is skipped: the commands then import it themselves."""

import importlib
import logging
import os

from jobs.agent import PRELOAD

for name in os.environ.get(PRELOAD, "").split():
    try:
        importlib.import_module(name)
    except Exception as error:
        logging.getLogger(__name__).warning("%s is not imported in advance: %r", name, error)
