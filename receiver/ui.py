"""What may take the landing page's place: an ASGI application, a folder, a Gradio `Blocks`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from fastapi import FastAPI
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

if TYPE_CHECKING:
    Ui = Union[ASGIApp, str, os.PathLike[str], "Blocks"]  # noqa: UP007

    class Blocks:
        """As `gradio.Blocks`, which is not installed here."""


def application_of(ui: "Ui") -> ASGIApp:
    """What answers for `ui`; if it is a FastAPI, its lifespan is to be entered.

    Raises `ValueError` for a path that is no folder, `TypeError` for anything else.
    """
    if isinstance(ui, str | os.PathLike):
        if not Path(ui).is_dir():
            raise ValueError(f"ui={str(ui)!r} is no folder: give one with an index.html")
        return StaticFiles(directory=ui, html=True)
    if _is_gradio(ui):
        return _gradio(ui)
    if not callable(ui):
        raise TypeError(
            f"ui is a {type(ui).__name__}: give an ASGI application, a folder, or a gradio.Blocks"
        )
    return ui


def _is_gradio(ui: object) -> bool:
    return any(
        kind.__name__ == "Blocks" and kind.__module__.partition(".")[0] == "gradio"
        for kind in type(ui).__mro__
    )


def _gradio(blocks: Any) -> FastAPI:
    import gradio  # installed where there are Blocks

    # In an application of its own: mounted at "/" of the server it would hide later routes.
    mounted: FastAPI = gradio.mount_gradio_app(FastAPI(), blocks, path="/")
    return mounted
