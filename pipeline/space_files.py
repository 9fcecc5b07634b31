"""Puts together the files of a Space that runs a receiver. These are the user's files and, if
`app.py` imports `receiver`, the package `receiver` with the parts of hotpush that it needs. This
module generates `README.md` and `requirements.txt` if the user's files do not have them. It
generates `app.py` only if the user has given no folder."""

import re
import shutil
from importlib.metadata import requires
from pathlib import Path

import jobs
import receiver
import serving
from pipeline.errors import PipelineError

APP = "app.py"
README = "README.md"
REQUIREMENTS = "requirements.txt"
PACKAGES = ("receiver/**", "jobs/**", "serving/**")
"""Patterns that match the files of hotpush's packages in the Space. The packages are sent
together with the app, because no package index has them. A file of the Space that matches a pattern
and is no longer sent is deleted."""
NOT_UPLOADED = (".*", "__pycache__", "*.pyc", "node_modules")
"""Patterns of the names of files and folders that are not sent to the Space. The first pattern also
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


def write_space(into: Path, title: str, folder: Path | None) -> None:
    """Write all files of the Space to the empty folder `into`. Raises PipelineError.

    `folder` has the user's files. If it is None, this writes an `app.py` that shows how to begin.
    `title` becomes the Space's title if the user has no README, or if the user's README does not
    begin with front matter (YAML between two lines `---`).
    """
    if folder is not None:
        _copy(folder, into)
    app = into / APP
    if not app.exists():
        if folder is not None:
            raise PipelineError(
                f"there is no {APP} in {folder}; a Space runs that file. Rename your script to "
                f"{APP}, or leave FOLDER out to get an {APP} that shows how to begin"
            )
        app.write_text(GENERATED_APP)
    if uses_receiver(app):
        _copy_packages(into)
        if not (into / REQUIREMENTS).exists():
            (into / REQUIREMENTS).write_text("".join(f"{each}\n" for each in _requirements()))
    elif not (into / REQUIREMENTS).exists():
        (into / REQUIREMENTS).write_text("huggingface_hub\n")
    readme = into / README
    text = readme.read_text() if readme.exists() else _ABOUT.format(title=title)
    if not text.startswith("---\n"):
        readme.write_text(_FRONT_MATTER.format(title=title) + text)


def uses_receiver(app: Path) -> bool:
    """Whether the script imports the package `receiver`."""
    return re.search(r"^\s*(from|import) receiver\b", app.read_text(), re.MULTILINE) is not None


def subdomain(space: str) -> str:
    """The first part of the host name of a Space: `owner-name` for the Space `owner/name`. It is in
    lower case. Each run of characters other than a-z and 0-9 becomes one hyphen, and there is no
    hyphen at the beginning or the end."""
    return re.sub(r"[^a-z0-9]+", "-", space.lower()).strip("-")


def _copy(folder: Path, into: Path) -> None:
    if not folder.is_dir():
        raise PipelineError(
            f"there is no folder {folder}; give the path of the folder that holds {APP}"
        )
    shutil.copytree(folder, into, ignore=shutil.ignore_patterns(*NOT_UPLOADED), dirs_exist_ok=True)


def _copy_packages(into: Path) -> None:
    """Copies the packages `receiver` and `jobs`, and `serving.http`, which `receiver` imports."""
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc", "engines", "weights")
    for package in (receiver, jobs):
        assert package.__file__ is not None
        source = Path(package.__file__).parent
        shutil.copytree(source, into / source.name, ignore=ignore, dirs_exist_ok=True)
    assert serving.__file__ is not None
    source = Path(serving.__file__).parent
    shutil.copytree(source / "http", into / "serving" / "http", ignore=ignore, dirs_exist_ok=True)
    shutil.copy(source / "__init__.py", into / "serving")


def _requirements() -> list[str]:
    """The packages that hotpush needs from a package index. An extra is an optional part of
    hotpush, such as `hotpush[torch]`. Packages that only an extra needs are left out."""
    needed = requires("hotpush") or []
    return sorted(each for each in needed if "extra ==" not in each)
