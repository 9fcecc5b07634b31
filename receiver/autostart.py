"""Starts the server at the end of the script that defines the server's handlers.

A function that `atexit` calls would start the server too late, because Python closes its thread
pools before it calls such functions. Without thread pools, `asyncio.to_thread`, name resolution and
async clients fail with "cannot schedule new futures after interpreter shutdown". So the server
starts earlier. On Python 3.12 and newer, it starts when the last line of the script has run. On
Python 3.11, it starts when Python is about to close the thread pools.
"""

import atexit
import concurrent.futures.thread  # noqa: F401  (its exit handler must be registered before ours)
import os
import sys
import threading
from collections.abc import Callable
from types import CodeType

from receiver.errors import ReceiverError


def at_end_of_script(start: Callable[[], object]) -> Callable[[], None]:
    """Arrange that `start` is called when the main script ends normally or with `sys.exit()`. If
    `start` raises a `ReceiverError`, the message of the error is printed, and the exit code is 1.

    If the script ends with an exception, `start` is not called. If the script ends with an error
    code, as in `sys.exit(1)`, `start` is not called on Python 3.12 and newer. On Python 3.11,
    `start` is called even then, because this module does not know the exit code at that point. A
    notebook or an interactive prompt has no script, so `start` is never called there. On Python
    3.12 and newer, only the thread that executes the script can arrange the call.

    Returns a function that cancels the call of `start`. Raises `ReceiverError` if the call cannot
    be arranged.
    """
    if is_interactive():
        return lambda: None
    if sys.version_info >= (3, 12):
        return _on_return_of_main(start)
    return _before_exit_handlers(start)


def is_interactive() -> bool:
    """Whether Python runs a notebook or an interactive prompt instead of a script."""
    return not hasattr(sys.modules["__main__"], "__file__")


if sys.version_info >= (3, 12):

    def _on_return_of_main(start: Callable[[], object]) -> Callable[[], None]:
        monitoring = sys.monitoring
        code = _main_code()
        if code is None:
            return lambda: None
        # sys.monitoring has the tool ids 0 to 5. All ids except 3 and 4 are reserved for debuggers,
        # coverage tools, profilers and optimizers.
        tool = next((id for id in (3, 4) if monitoring.get_tool(id) is None), None)
        if tool is None:
            raise ReceiverError(
                "Cannot start the webhook server at the end of the script, because other tools use"
                " the ids 3 and 4 of sys.monitoring. Call launch() on a decorated function instead."
            )

        events = monitoring.events

        def cancel() -> None:
            if monitoring.get_tool(tool) == __name__:
                monitoring.set_local_events(tool, code, events.NO_EVENTS)
                monitoring.set_events(tool, events.NO_EVENTS)
                monitoring.register_callback(tool, events.PY_RETURN, None)
                monitoring.register_callback(tool, events.PY_UNWIND, None)
                monitoring.free_tool_id(tool)

        def begin() -> None:
            cancel()
            try:
                start()
            except ReceiverError as error:
                sys.exit(str(error))

        def on_return(_code: CodeType, _offset: int, _value: object) -> None:
            begin()

        def on_unwind(unwound: CodeType, _offset: int, error: BaseException) -> None:
            if unwound is code and isinstance(error, SystemExit) and not error.code:
                begin()

        monitoring.use_tool_id(tool, __name__)
        monitoring.register_callback(tool, events.PY_RETURN, on_return)
        monitoring.set_local_events(tool, code, events.PY_RETURN)
        # A script that ends with `sys.exit()` causes the event PY_UNWIND. This event cannot be
        # limited to one code object, so `on_unwind` checks that the event comes from the script.
        monitoring.register_callback(tool, events.PY_UNWIND, on_unwind)
        monitoring.set_events(tool, events.PY_UNWIND)
        return cancel

    def _main_code() -> CodeType | None:
        """The code object of the main script. None if this thread is not executing the script."""
        frame = sys._getframe()
        main = vars(sys.modules["__main__"])
        while frame is not None:
            if frame.f_globals is main and frame.f_code.co_name == "<module>":
                return frame.f_code
            frame = frame.f_back
        return None

else:

    def _before_exit_handlers(start: Callable[[], object]) -> Callable[[], None]:
        is_wanted = True
        main = sys.modules["__main__"]
        file = main.__file__

        def cancel() -> None:
            nonlocal is_wanted
            is_wanted = False

        def on_exit() -> None:
            ended_in_error = hasattr(sys, "last_value")
            if not is_wanted or ended_in_error:
                return
            main.__file__ = file  # Python has removed it, but handlers may use it
            try:
                start()
            except ReceiverError as error:
                # At this point, only `os._exit` can set the exit code. `os._exit` skips the
                # functions that are registered with `atexit`, so run them first.
                print(error, file=sys.stderr)
                atexit._run_exitfuncs()
                sys.stdout.flush()
                os._exit(1)

        # Python calls the registered functions in the reverse order of their registration. So
        # `on_exit` runs before the function with which concurrent.futures closes its thread pools.
        # `_register_atexit` is private, but it will not change, because Python 3.11 gets only
        # security fixes.
        threading._register_atexit(on_exit)  # type: ignore[attr-defined]
        return cancel
