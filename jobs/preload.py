"""The fork server imports this module, which imports the modules that the variable `PRELOAD` names.
A module that cannot be imported is skipped: the commands then import it themselves."""

import importlib
import logging
import os

from jobs.agent import PRELOAD
from jobs.job import SHORT_SPINS, thread_variables

# Set the variables before the imports, because libraries read them when they are loaded.
os.environ.update(
    {
        **SHORT_SPINS,
        # A fork does not copy threads. So limit the pools to one thread: in the fork, a larger pool
        # would wait for its missing threads for ever.
        **thread_variables(1),
        # Otherwise pyarrow's memory allocator starts a thread when pyarrow is imported.
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
    }
)
for name in os.environ.get(PRELOAD, "").split():
    try:
        importlib.import_module(name)
    except Exception as error:
        logging.getLogger(__name__).warning("%s is not imported in advance: %r", name, error)
