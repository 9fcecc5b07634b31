"""What the hub's own token allows: to manage tokens, to remove the commits and large files that
nothing needs any more (`collect_garbage`), and to remove a commit that was pushed by mistake
(`purge`). The commands `pipeline hub tokens`, `gc` and `purge` call the routes.

A token that a person created may only read, or read and write.

A commit that is on no branch any more stays, because a release may name it, and a client may fetch
it by its sha. Only `sweep` removes such commits. Git itself never does it (`gc.auto = 0`). Every
step may be repeated. So if one is killed, it can be started again.
"""

import re
import secrets
import time
from collections import Counter
from typing import TypedDict

from fastapi import APIRouter, Depends
from sqlalchemy import delete, insert, select
from starlette.requests import Request
from starlette.responses import JSONResponse

from pipeline.hub import xet
from pipeline.hub.contents import all_commits, look_up
from pipeline.hub.database import Database, events
from pipeline.hub.database import tokens as table
from pipeline.hub.errors import BadRequest, Conflict, HubError, NotFound
from pipeline.hub.garbage import sweep
from pipeline.hub.git import PUSHED_PREFIXES, git, lines_of
from pipeline.hub.http_json import Json, iso_time
from pipeline.hub.large_files import GRACE_SECONDS
from pipeline.hub.releases import sync_releases
from pipeline.hub.repositories import SHA, Repository, open_bases
from pipeline.hub.routes.contents import described
from pipeline.hub.service import HubOf, Locked, NeededCommits, Role, digest, hubs_own

_PURGE = "/purge/{repository:typed_repository}/{sha}"
_MAX_NAMED = 5

router = APIRouter(prefix="/api/settings", dependencies=[Depends(hubs_own)])


@router.get("/tokens")
def list_tokens(hub: HubOf) -> list[Json]:
    with hub.database.read() as connection:
        return [
            {"name": row.name, "role": row.role, "createdAt": iso_time(row.created_at)}
            for row in connection.execute(select(table).order_by(table.c.created_at))
        ]


@router.post("/tokens/{name:part}")
def create_token(hub: HubOf, name: str, role: Role = "read") -> JSONResponse:
    """Creates a token. Only this answer shows the token."""
    check_name(name)
    token = f"hf_{secrets.token_hex(20)}"
    with hub.database.write() as connection:
        if connection.execute(select(table.c.name).where(table.c.name == name)).first() is not None:
            raise Conflict(
                f"There is a token {name!r} already: revoke it first, or choose another name."
            )
        connection.execute(
            insert(table).values(
                name=name, digest=digest(token.encode()), role=role, created_at=time.time()
            )
        )
    made = {"name": name, "role": role, "token": token}
    return JSONResponse(made, headers={"Cache-Control": "no-store"})


@router.delete("/tokens/{name:part}")
def revoke_token(hub: HubOf, name: str) -> Json:
    """Deletes a token, so that the next request with it is refused. Raises NotFound."""
    with hub.database.write() as connection:
        if connection.execute(delete(table).where(table.c.name == name)).rowcount == 0:
            raise NotFound(
                f"There is no token {name!r} here: list the tokens with `pipeline hub tokens ls`."
            )
    return {"revoked": name}


async def without_removed_releases(hub: HubOf) -> None:
    """Removes the tags and files of releases that are gone from the disk, so that what follows
    leaves none of them."""
    await sync_releases(hub.releases)


@router.post("/gc", dependencies=[Depends(without_removed_releases)])
async def gc(hub: HubOf) -> Json:
    """Cleans all repositories: removes the commits that are on no branch any more and that no
    release, job or stored event needs, and the large files that no commit names. Pushes to a
    repository wait while it is cleaned."""
    removed = Counter(released=0, large_bytes=0)

    def collect(repository: Repository) -> None:
        removed.update(collect_garbage(repository, hub.database, hub.needed_commits))

    await hub.repositories.for_each(collect)
    return {**removed}


@router.get(_PURGE)
@router.post(_PURGE, dependencies=[Depends(without_removed_releases)])
def purge_commit(request: Request, hub: HubOf, repository: Locked, sha: str) -> Json:
    """Removes a commit that was pushed by mistake. With GET, only says what a purge would remove.
    The answer is 409 if the history of a branch, a tag or an open pull request still has the
    commit."""
    act = plan_purge if request.method == "GET" else purge
    answer = act(repository, hub.database, sha)
    described.cache_clear()  # it may hold the card of a removed commit
    return dict(answer)


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def check_name(name: str) -> None:
    """Raises BadRequest if a token cannot have this name."""
    if not _NAME.fullmatch(name):
        raise BadRequest(
            f"{name!r} is not a valid name for a token: use 1 to 96 letters, digits, '-', '_' and "
            "'.', beginning with a letter or a digit."
        )


def collect_garbage(
    repository: Repository, database: Database, needed_commits: NeededCommits
) -> Counter[str]:
    """Removes the commits that are on no branch any more, and that neither `needed_commits` nor a
    stored event names. Also removes the large files that no commit names.

    The chunks that `hf_xet` has sent are removed too, if no upload began in the last
    `GRACE_SECONDS`. `hf_xet` sends them again when it needs them.

    Counts what was removed: the commits (`released`), and the bytes of large files (`large_bytes`).
    The caller holds the repository's lock. Otherwise this would remove the objects of a push that
    is under way, because they have no ref yet.
    """
    with database.read() as connection:
        told = connection.scalars(
            select(events.c.updated_refs).where(events.c.repository_id == repository.id)
        )
        named = {each[key] for moved in told for each in moved for key in ("old_sha", "new_sha")}
    num_before = len(all_commits(repository))
    large_bytes = sweep(repository, {*needed_commits(), *named} - {None})
    xet.empty(repository.folder, grace_seconds=GRACE_SECONDS)
    num_removed = num_before - len(all_commits(repository))
    return Counter(released=num_removed, large_bytes=large_bytes)


class Purge(TypedDict):
    commits: list[str]
    """The shas of all commits that are removed: the given commit, and the commits after it, which
    contain it."""
    refs: list[str]
    """The refs that lead to the commit, and that are removed too."""
    is_there: bool
    """False if the repository does not have the commit (any more)."""


def plan_purge(repository: Repository, database: Database, sha: str) -> Purge:
    """What a purge would remove. Nobody can push to the ref of a pull request that is not open, so
    a purge removes it.

    Raises BadRequest if `sha` is not the sha of a commit, and Conflict if a branch, a tag or an
    open pull request leads to the commit.
    """
    if not SHA.fullmatch(sha):
        raise BadRequest(f"{sha!r} is not the sha of a commit: give all 40 digits of its sha.")
    [found] = look_up(repository, [sha])
    if found is None:
        return Purge(commits=[sha], refs=[], is_there=False)
    if found[1] != "commit":
        raise BadRequest(
            f"{sha} is a {found[1]}, not a commit: give the sha of the commit that brought it."
        )
    leading = lines_of(
        git(repository.folder, "for-each-ref", f"--contains={sha}", "--format=%(refname)")
    )
    open_refs = open_bases(database, repository)
    pushed = [ref for ref in leading if ref.startswith(PUSHED_PREFIXES) or ref in open_refs]
    if pushed:
        names = ", ".join(pushed[:_MAX_NAMED]) + (", …" if len(pushed) > _MAX_NAMED else "")
        raise Conflict(
            f"{names} of the {repository.name} still {'leads' if len(pushed) == 1 else 'lead'} to "
            f"{sha}: first remove the commit there (git push --force), or delete the branch or "
            "tag, or close the pull request."
        )
    after = git(
        repository.folder,
        *("rev-list", "--ancestry-path", "--stdin", f"^{sha}"),
        stdin="".join(f"{each}\n" for each in all_commits(repository)).encode(),
    )
    return Purge(commits=[sha, *lines_of(after)], refs=leading, is_there=True)


def purge(repository: Repository, database: Database, sha: str) -> Purge:
    """Removes the commits and refs of the plan that `plan_purge` makes, and returns the plan. The
    caller holds the repository's lock. Raises the errors of `plan_purge`, and HubError if the
    commit is still there afterwards."""
    planned = plan_purge(repository, database, sha)
    commands = "".join(f"delete {ref}\n" for ref in planned["refs"])
    git(repository.folder, "update-ref", "--stdin", stdin=commands.encode())
    needed = set(all_commits(repository)).difference(planned["commits"])
    sweep(repository, needed, new_files_stay=False)
    xet.empty(repository.folder, grace_seconds=0)
    if look_up(repository, [sha]) != [None]:
        raise HubError(
            f"{sha} is still in {repository.folder}: something that is not a ref leads to it, such "
            "as objects/info/alternates or HEAD. Remove that, then purge again."
        )
    return planned
