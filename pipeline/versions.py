"""Finds the installed versions of Python and of some packages, without importing the packages."""

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("hotpush", "torch", "transformers", "datasets", "huggingface_hub")


def installed_versions() -> dict[str, str | None]:
    """Name → version; None for a package that is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
