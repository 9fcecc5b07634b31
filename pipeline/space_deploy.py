"""Creates or updates a Space that runs a receiver. A Space is a repository with an app, and the
Hugging Face Hub runs this app.

The Space gets the user's files, and the packages of hotpush that `receiver` needs. Without the
user's files, it gets an `app.py` to begin with. It also gets a `README.md` and a `requirements.txt`
if the user has none.
"""

import re
import shutil
import tempfile
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path
from typing import Literal

import receiver
from pipeline.errors import PipelineError
from receiver.webhooks import hub_errors

SECRET = "WEBHOOK_SECRET"
APP = "app.py"
README = "README.md"
REQUIREMENTS = "requirements.txt"
PACKAGES = ("receiver/**", "jobs/**", "serving/**")
"""Patterns that match the files of hotpush's packages in the Space. The packages are sent
together with the app, because no package index has them. A file of the Space that matches a pattern
and is no longer sent is deleted."""
NOT_UPLOADED = shutil.ignore_patterns(".*", "__pycache__", "*.pyc", "node_modules")
"""The names of files and folders that are not sent to the Space. The first pattern also
matches `.env`, a file that often holds secrets."""

GENERATED_APP = '''\
"""Receives webhooks. Each function is a route: POST /webhooks/<its name>."""

from receiver import WebhookPayload, webhook_endpoint


@webhook_endpoint
async def on_push(payload: WebhookPayload):
    if payload.repo.type != "dataset" or payload.event.action != "update":
        return {"ignored": f"{payload.event.action} of a {payload.repo.type}"}
    # Replace this line with the work that a push should start.
    print(f"{payload.repo.name} is at {payload.repo.headSha}", flush=True)
    return {"seen": payload.repo.headSha}
'''
_FRONT_MATTER = """\
---
title: {title}
sdk: gradio
python_version: "3.12"
app_file: app.py
---
"""
_ABOUT = """
# {title}

A receiver of webhooks. `pipeline receiver deploy` made this Space.
It accepts only deliveries whose sender knows the secret `WEBHOOK_SECRET` of this Space.
"""


@dataclass(frozen=True, kw_only=True)
class Deployed:
    url: str
    """The URL of the Space's page."""
    files: tuple[str, ...]
    """The paths of the files that were sent."""
    commit: str
    """The commit that was made in the Space."""


def deploy(
    space: str,
    folder: Path | None,
    secret: str,
    *,
    endpoint: str,
    token: str | Literal[False],
) -> Deployed:
    """Create the Space, or update it if it exists. Raises PipelineError for a wrong folder, and
    WebhookApiError if the hub fails.

    `folder` has the user's files. If it is None, the Space gets an `app.py` that shows how to
    begin. `secret` becomes the Space's secret `WEBHOOK_SECRET`.
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint, token=token)
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary)
        _write_space(made, space.partition("/")[2], folder)
        found = (each for each in made.rglob("*") if each.is_file())
        files = tuple(sorted(each.relative_to(made).as_posix() for each in found))
        with hub_errors(endpoint, f"the deployment of the Space {space}"):
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
                delete_patterns=list(PACKAGES),
            ).oid
        url = f"{endpoint.rstrip('/')}/spaces/{space}"
        return Deployed(url=url, files=files, commit=commit)


def public_address(space: str) -> str:
    """The URL at which the Hugging Face Hub serves the app of a Space: for the Space `Owner/name`,
    this is https://owner-name.hf.space."""
    name = re.sub(r"[^a-z0-9]+", "-", space.lower()).strip("-")
    return f"https://{name}.hf.space"


def _write_space(into: Path, title: str, folder: Path | None) -> None:
    """Write all files of the Space to the empty folder `into`. Raises PipelineError.

    `folder` has the user's files. If it is None, this writes an `app.py` that shows how to begin.
    `title` becomes the Space's title if the user has no README, or if the user's README does not
    begin with front matter (YAML between two lines `---`).
    """
    if folder is not None:
        if not folder.is_dir():
            raise PipelineError(
                f"there is no folder {folder}; give the path of the folder that holds {APP}"
            )
        shutil.copytree(folder, into, ignore=NOT_UPLOADED, dirs_exist_ok=True)
    app = into / APP
    if not app.exists():
        if folder is not None:
            raise PipelineError(
                f"there is no {APP} in {folder}; a Space runs that file. Rename your script to "
                f"{APP}, or leave FOLDER out to get an {APP} that shows how to begin"
            )
        app.write_text(GENERATED_APP)
    _copy_packages(into)
    # Without the packages that only an extra needs, such as `hotpush[torch]`.
    needed = sorted(each for each in requires("hotpush") or () if "extra ==" not in each)
    if not (into / REQUIREMENTS).exists():
        (into / REQUIREMENTS).write_text("".join(f"{each}\n" for each in needed))
    readme = into / README
    text = readme.read_text() if readme.exists() else _ABOUT.format(title=title)
    if not text.startswith("---\n"):
        readme.write_text(_FRONT_MATTER.format(title=title) + text)


def _copy_packages(into: Path) -> None:
    """Copies the packages `receiver` and `jobs`, and `serving.http`, which `receiver` imports."""
    root = Path(receiver.__path__[0]).parent
    for package in ("receiver", "jobs", "serving/http"):
        shutil.copytree(root / package, into / package, ignore=NOT_UPLOADED, dirs_exist_ok=True)
    shutil.copy(root / "serving" / "__init__.py", into / "serving")
