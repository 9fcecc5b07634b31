"""The user's own Hugging Face token, for all hubs except the stack's own hub. In a job, `HF_TOKEN`
is the token for the stack's hub."""

from collections.abc import Mapping
from pathlib import Path

OWN_TOKEN = "OWN_HF_TOKEN"
"""The environment variable in which a job finds the user's own token."""

OWN_TOKEN_SOURCE = "HF_TOKEN of the shell that started the stack, or the token of `hf auth login`"


TOKEN_OF_ENV = "PIPELINE_ENV_TOKEN"
"""`pipeline env` sets this variable to the token of its hub, like `HF_TOKEN`. So another stack does
not take this token for the user's own, and sends it to no other hub."""


def token_of_shell(environ: Mapping[str, str], stack_token: str) -> str | None:
    """`HF_TOKEN`, if a person set it."""
    token = environ.get("HF_TOKEN")
    is_of_stack = token in (stack_token, environ.get(TOKEN_OF_ENV))
    return None if is_of_stack else token or None


def own_token(environ: Mapping[str, str], stack_token: str) -> str | None:
    """The token that a person set in this shell, or that `hf auth login` stored."""
    return token_of_shell(environ, stack_token) or cached_login()


def cached_login() -> str | None:
    """The token that `hf auth login` stored."""
    from huggingface_hub import constants

    try:
        return Path(constants.HF_TOKEN_PATH).read_text().strip() or None
    except OSError:
        return None
