"""Serves a `gradio.Blocks`, a user interface of the library gradio, as the page of a receiver.

gradio's own method `launch` sets attributes of the blocks, such as `ui.server`, `ui.local_url`,
`ui.share_url` and `ui.is_running`. A script may read these attributes, so this module sets them
too."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from fastapi import FastAPI


def is_blocks(ui: object) -> bool:
    """Whether `ui` is a `gradio.Blocks`. Does not import gradio, which may not be installed."""
    return any(
        kind.__name__ == "Blocks" and kind.__module__.partition(".")[0] == "gradio"
        for kind in type(ui).__mro__
    )


def application_of_blocks(blocks: Any) -> FastAPI:
    """An application that serves `blocks`. The caller must enter the lifespan of the application
    (the context in which it starts and stops its own tasks)."""
    import gradio  # gradio is installed here, because the user has passed a gradio.Blocks

    # Mount the interface in a separate application. If it were mounted at "/" of the server's own
    # application, it would hide the routes that a script adds later.
    mounted: FastAPI = gradio.mount_gradio_app(FastAPI(), blocks, path="/")
    return mounted


class ServerOfBlocks:
    """The value of `ui.server`. A script may call its method `close`."""

    def __init__(self, close: Callable[[], None]) -> None:
        self.close = close


def show_as_running(
    blocks: Any, *, app: FastAPI, local_url: str, share_url: str | None, close: Callable[[], None]
) -> None:
    """Set the attributes that a script may read after `launch`. `close` is a function that stops
    the server. `share_url` is the public URL, or None if the server has no public URL."""

    def close_and_record() -> None:
        blocks.is_running = False
        close()

    blocks.server = ServerOfBlocks(close_and_record)
    blocks.server_app = app
    blocks.local_url = f"{local_url}/"
    blocks.share_url = share_url
    blocks.is_running = True


def block_until_interrupted(blocks: Any) -> None:
    """Wait until Ctrl-C or SIGTERM, and then close the server. After SIGTERM, also end the process.

    To wait, this function calls `blocks.block_thread()`. A script may have replaced this method
    with a method of its own, and then expects that `launch` calls the script's method."""
    if threading.current_thread() is not threading.main_thread():
        blocks.block_thread()  # only the main thread can set signal handlers
        return
    is_terminated = False

    def terminate(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_terminated
        is_terminated = True
        raise KeyboardInterrupt  # makes `block_thread` stop waiting

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        blocks.block_thread()
    finally:
        signal.signal(signal.SIGTERM, before)
    if is_terminated:
        blocks.server.close()
        signal.raise_signal(signal.SIGTERM)
