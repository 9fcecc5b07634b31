"""Defines `Finding`: one thing that a check of `pipeline doctor` found."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Finding(BaseModel):
    model_config = ConfigDict(frozen=True)

    check: str
    """What was checked, in one or two words, such as `git` or `hub database`."""
    level: Literal["ok", "wrong"]
    message: str
    """What was found."""
    next_step: str | None = None
    """What the user can do about the fault; None if nothing is wrong."""


def ok(check: str, message: str) -> Finding:
    return Finding(check=check, level="ok", message=message)


def wrong(check: str, message: str, next_step: str) -> Finding:
    return Finding(check=check, level="wrong", message=message, next_step=next_step)
