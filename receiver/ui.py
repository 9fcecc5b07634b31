"""The argument `ui` of `WebhooksServer` is a user interface that replaces the landing page at the
URL path `/`: an ASGI application, a folder or a `gradio.Blocks`. This module turns it into an ASGI
application."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Union

from fastapi import FastAPI
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

if TYPE_CHECKING:
    Ui = Union[ASGIApp, str, os.PathLike[str], "Blocks"]  # noqa: UP007

    class Blocks:
        """Stands for the type `gradio.Blocks`. The type checker sees this class instead, because
        gradio may not be installed."""


def application_of(ui: "Ui") -> ASGIApp:
    """The application that serves `ui`. If this application is a FastAPI, the caller must enter its
    lifespan (the context in which it starts and stops its own tasks).

    Raises `ValueError` if `ui` is a path that is not a folder, and `TypeError` if `ui` is an object
    that cannot be served.
    """
    if isinstance(ui, str | os.PathLike):
        if not Path(ui).is_dir():
            raise ValueError(f"ui={str(ui)!r} is not a folder: pass a folder with an index.html")
        return StaticFiles(directory=ui, html=True)
    if _is_blocks(ui):
        import gradio  # gradio is installed, because the user has passed a gradio.Blocks

        # Mount the interface in a separate application. If it were mounted at "/" of the server's
        # own application, it would hide the routes that a script adds later.
        mounted: FastAPI = gradio.mount_gradio_app(FastAPI(), ui, path="/")
        return mounted
    if not callable(ui):
        raise TypeError(
            f"ui is a {type(ui).__name__}: pass an ASGI application, a folder or a gradio.Blocks"
        )
    return ui


def _is_blocks(ui: object) -> bool:
    """Whether `ui` is a `gradio.Blocks`. Does not import gradio, which may not be installed."""
    return any(
        kind.__name__ == "Blocks" and kind.__module__.partition(".")[0] == "gradio"
        for kind in type(ui).__mro__
    )
