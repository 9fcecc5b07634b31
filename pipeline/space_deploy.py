"""Creates or updates a Space that runs a receiver. A Space is a repository with an app, and the
Hugging Face Hub runs this app."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import PipelineError
from pipeline.space_files import APP, PACKAGES, subdomain, uses_receiver, write_space

SECRET = "WEBHOOK_SECRET"


@dataclass(frozen=True, kw_only=True)
class Deployed:
    url: str
    """The URL of the Space's page."""
    files: tuple[str, ...]
    """The paths of the files that were sent, or that would be sent without `dry_run`."""
    commit: str | None
    """The commit that was made in the Space; None if nothing was sent."""


def deploy(
    space: str,
    folder: Path | None,
    secret: str,
    *,
    endpoint: str,
    token: str | None,
    dry_run: bool = False,
) -> Deployed:
    """Create the Space, or update it if it exists. With `dry_run`, send nothing. Raises
    PipelineError.

    `folder` has the user's files. If it is None, the Space gets an `app.py` that shows how to
    begin. `secret` becomes the Space's secret `WEBHOOK_SECRET`.
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint, token=token or False)
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary)
        write_space(made, space.partition("/")[2], folder)
        files = tuple(
            sorted(each.relative_to(made).as_posix() for each in made.rglob("*") if each.is_file())
        )
        commit = None
        if not dry_run:
            with _translated(space, endpoint):
                api.create_repo(space, repo_type="space", space_sdk="gradio", exist_ok=True)
                # Set the secret before the upload, because the app does not start without the
                # secret.
                api.add_space_secret(
                    space,
                    SECRET,
                    secret,
                    description="Shows that a delivery comes from your webhook",
                )
                commit = api.upload_folder(
                    repo_id=space,
                    repo_type="space",
                    folder_path=made,
                    commit_message="Deploy the receiver",
                    # The Space may have an older version of the packages. Delete the files of the
                    # older version that the new version does not have.
                    delete_patterns=list(PACKAGES) if uses_receiver(made / APP) else None,
                ).oid
        return Deployed(
            url=f"{endpoint.rstrip('/')}/spaces/{space}",
            files=files,
            commit=commit,
        )


def public_address(space: str) -> str:
    """The URL at which the Hugging Face Hub serves the app of a Space."""
    return f"https://{subdomain(space)}.hf.space"


@contextmanager
def _translated(space: str, endpoint: str) -> Iterator[None]:
    """Turns the errors of huggingface_hub into PipelineError."""
    import httpx2  # huggingface_hub raises the errors of httpx2 when a connection fails
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    try:
        yield
    except HFValidationError as error:
        raise PipelineError(f"{space!r} is not a name of a Space: {error}") from None
    except LocalTokenNotFoundError:
        raise PipelineError(
            f"there is no token for {endpoint}: set HF_TOKEN, or run `hf auth login`"
        ) from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        next_step = "; set HF_TOKEN to a token that may write there" if status in (401, 403) else ""
        raise PipelineError(
            f"{endpoint} answered {status} about the Space {space}: "
            f"{error.server_message or error}{next_step}"
        ) from error
    except httpx2.HTTPError as error:
        raise PipelineError(
            f"{endpoint} cannot be reached ({error}); start this hub, or give another --endpoint"
        ) from error
