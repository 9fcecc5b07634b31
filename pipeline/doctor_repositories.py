"""The check of `pipeline doctor` that looks for lost objects in the followed repositories of the
stack's own hub."""

import shutil
from collections.abc import Iterator

from pipeline.findings import Finding, ok, wrong
from pipeline.hub.errors import DiskFull, HubError, TooSlow
from pipeline.hub.git.process import git
from pipeline.hub.repositories.names import repository_name
from pipeline.hub.repositories.store import Repositories
from pipeline.paths import Home
from pipeline.settings import Settings

SECONDS = 20.0
"""How long git may look for lost objects in one repository. For a large repository, this time is
too short. The check then reports no fault."""


def check_repositories(home: Home, settings: Settings) -> Iterator[Finding]:
    if not home.hub_dir.is_dir() or shutil.which("git") is None:
        return  # the check of the programs reports that git is missing
    for dataset in settings.datasets_on_hub:
        name = repository_name("dataset", *dataset.split("/"))
        folder = Repositories(home.hub_dir).folder(name)
        if not folder.is_dir():
            continue
        try:
            git(folder, "rev-list", "--objects", "--quiet", "--branches", seconds=SECONDS)
        except TooSlow:
            yield ok("repository", f"{dataset}: too large to look at every object")
        except DiskFull as error:  # also if only a quota is used up, so that the disk has room
            yield wrong(
                "repository",
                f"{dataset} was not checked: {error}",
                "free disk space, then repeat: pipeline doctor",
            )
        except HubError as error:
            yield wrong(
                "repository",
                f"{dataset} is damaged: {error}",
                f"restore {folder} from a backup, or copy the objects of a clone that has them: "
                "git -C CLONE pack-objects --all --stdout < /dev/null | "
                f"git --git-dir={folder} unpack-objects",
            )
        else:
            yield ok("repository", f"{dataset}: no object of a branch is missing")
