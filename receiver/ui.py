"""Turns the user's interface for `/` into an ASGI application. The user may pass an application, a
folder or a `gradio.Blocks`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from fastapi import FastAPI
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

if TYPE_CHECKING:
    Ui = Union[ASGIApp, str, os.PathLike[str], "Blocks"]  # noqa: UP007

    class Blocks:
        """A substitute for `gradio.Blocks`, because gradio may not be installed."""


def application_of(ui: "Ui") -> ASGIApp:
    """The application that serves `ui`. If the result is a FastAPI, the caller must enter its
    lifespan.

    Raises `ValueError` for a path that is not a folder, and `TypeError` for any other object.
    """
    if isinstance(ui, str | os.PathLike):
        if not Path(ui).is_dir():
            raise ValueError(f"ui={str(ui)!r} is not a folder: pass a folder with an index.html")
        return StaticFiles(directory=ui, html=True)
    if _is_gradio(ui):
        return _gradio(ui)
    if not callable(ui):
        raise TypeError(
            f"ui is a {type(ui).__name__}: pass an ASGI application, a folder or a gradio.Blocks"
        )
    return ui


def _is_gradio(ui: object) -> bool:
    return any(
        kind.__name__ == "Blocks" and kind.__module__.partition(".")[0] == "gradio"
        for kind in type(ui).__mro__
    )


def _gradio(blocks: Any) -> FastAPI:
    import gradio  # must be installed, since the user passed Blocks

    # Mount the interface in a separate application. If it were mounted at "/" of the server, it
    # would hide the routes that are added later.
    mounted: FastAPI = gradio.mount_gradio_app(FastAPI(), blocks, path="/")
    return mounted
