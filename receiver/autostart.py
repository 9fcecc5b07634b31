"""Starting the server when the script that defines its handlers ends.

An exit handler is too late: from then on `asyncio.to_thread`, name resolution and async clients
fail with "cannot schedule new futures after interpreter shutdown". So the start happens while the
script's module code is about to return (Python 3.12+), or before any exit handler (3.11).
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
    """Call `start` when the main script ends, without an exception or with `sys.exit()`; returns
    what calls that off. A `ReceiverError` of `start` is one line on the terminal, and exit code 1.

    On Python 3.11 nothing tells `sys.exit(1)` from `sys.exit()` then: both start.

    Where there is no script, as in a notebook or at a prompt, `start` is never called.
    """
    if is_interactive():
        return _nothing
    if sys.version_info >= (3, 12):
        return _on_return_of_main(start)
    return _before_exit_handlers(start)


def is_interactive() -> bool:
    """Is this a notebook or a prompt, where code has no end?"""
    return not hasattr(sys.modules["__main__"], "__file__")


def _nothing() -> None: ...


if sys.version_info >= (3, 12):

    def _on_return_of_main(start: Callable[[], object]) -> Callable[[], None]:
        monitoring = sys.monitoring
        code = _main_code()
        if code is None:
            return _nothing
        tool = next((id for id in (3, 4) if monitoring.get_tool(id) is None), None)
        if tool is None:
            raise ReceiverError(
                "Cannot start the webhook server at the end of the script: other tools hold every"
                " slot of sys.monitoring. Call launch() on a decorated function instead."
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
        # `sys.exit()` in the script's last line. There is no such event of one code object alone.
        monitoring.register_callback(tool, events.PY_UNWIND, on_unwind)
        monitoring.set_events(tool, events.PY_UNWIND)
        return cancel

    def _main_code() -> CodeType | None:
        """Of the main script, if it is at work in this thread."""
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

        def cancel() -> None:
            nonlocal is_wanted
            is_wanted = False

        def on_exit() -> None:
            ended_in_error = hasattr(sys, "last_value")
            if not is_wanted or ended_in_error:
                return
            try:
                start()
            except ReceiverError as error:
                # Too late for an exit code but by force, which skips the exit handlers.
                print(error, file=sys.stderr)
                atexit._run_exitfuncs()
                sys.stdout.flush()
                os._exit(1)

        # Called before concurrent.futures closes its executors: the last registered comes first.
        # Private, and settled: 3.11 gets security fixes only.
        threading._register_atexit(on_exit)  # type: ignore[attr-defined]
        return cancel
