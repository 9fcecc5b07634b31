"""The argument `ui` of `WebhooksServer` is a user interface that replaces the landing page at the
URL path `/`."""

from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp


def application_of(ui: Any) -> ASGIApp:
    """The application that serves `ui`, which is an ASGI application or a `gradio.Blocks`. If this
    application is a FastAPI, the caller must enter its lifespan (the context in which it starts and
    stops its own tasks). Raises `TypeError` if `ui` is something else."""
    # Do not import gradio to find out, because it may not be installed.
    if any(f"{kind.__module__}.".startswith("gradio.") for kind in type(ui).__mro__):
        import gradio

        # Mount the interface in a separate application. If it were mounted at "/" of the server's
        # own application, it would hide the routes that a script adds later.
        mounted: FastAPI = gradio.mount_gradio_app(FastAPI(), ui, path="/")
        return mounted
    if not callable(ui):
        raise TypeError(f"ui is a {type(ui).__name__}: pass an ASGI application or a gradio.Blocks")
    application: ASGIApp = ui
    return application
