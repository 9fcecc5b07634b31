"""The calls of an agent elsewhere (`jobs/attempt.py`), which a hub makes on the store for it
(`pipeline/hub/routes/attempts.py`).

The agent needs a URL and a *ticket*. The ticket is good for one agent's start. The answer has the
attempt's token, which is good until the attempt ends, and the secrets of the job. So whoever reads
a ticket in an engine's records later gets nothing for it.
"""

import logging
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from jobs.attempt import Lost, Orders
from jobs.errors import LeaseLost, StoreError
from jobs.folder import IDENTITY, LOG, METRICS, PAYLOAD, SPEC
from jobs.job import Job, JobState
from jobs.outcome import JobOutcome
from jobs.settings import JobsSettings

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 30.0
_RELEASE_SECONDS = 600.0
"""For an answer to `start` and `finish`: the hub may have to read a large release first."""
PIECE_BYTES = 512 * 1024
"""Less than the limit of most proxies for a body, which is 1 MiB."""
_MAX_PIECES = 64
"""At most so many pieces are sent in one beat, because the agent does nothing else meanwhile."""
_MAX_RECORDS_BYTES = PIECE_BYTES
_RECORD = re.compile(r"[A-Za-z][\w-]{0,60}\.json")
GROWING = (LOG, METRICS)
"""The files of a job's folder to which every attempt appends."""

_STOPPED = Lost(
    "The engine stopped the job: at its own time limit, for another job, or because somebody asked."
)

Message = TypeVar("Message", bound=BaseModel)


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Started(_Message):
    """The answer to an agent elsewhere whose attempt begins."""

    job: Job
    token: str
    variables: dict[str, str]
    """Of the attempt, for `job_environment`: the attempt's token and other secrets."""
    unsealed: dict[str, str]
    settings: JobsSettings
    sizes: dict[str, int]
    """How many bytes the hub has of each `GROWING` file, from earlier attempts."""


class Finish(_Message):
    """How an attempt elsewhere ended (`outcome_of_exit`): `outcome` and `lost` are not both set."""

    outcome: JobOutcome | None = None
    lost: Lost | None = None
    records: dict[str, str] = {}
    """The other files that the job has left in its folder: name → text."""


class Finished(_Message):
    state: JobState


class AttemptOnHub:
    """The calls of an agent elsewhere. `url` is the attempt's on a hub, and `jobs_dir` an empty
    folder. The constructor begins the attempt; it raises the errors of `Calls`."""

    def __init__(self, url: str, ticket: str, jobs_dir: Path, handle: str) -> None:
        self._url = url
        with _client(ticket) as self._http:
            self.started = self._post(
                "start", Started, json={"handle": handle}, timeout=_RELEASE_SECONDS
            )
        # Another one, because the agent forks between this call and the next one.
        self._http = _client(self.started.token)
        self._dir = jobs_dir / self.started.job.id
        self._sent = dict.fromkeys(GROWING, 0)

    @property
    def hub_url(self) -> str:
        """As this machine reaches it."""
        parts = urlsplit(self._url)
        return f"{parts.scheme}://{parts.netloc}"

    def start(self, handle: str) -> None:
        """It has begun already."""

    def beat(self) -> Orders:
        """Also sends what the command has written to the `GROWING` files since the last call."""
        for _ in range(_MAX_PIECES):
            name, piece = self._next_piece()
            where = {} if name is None else {"name": name, "offset": self._offset(name)}
            orders = self._post("beat", Orders, params=where, content=piece)
            if name is None:
                break
            self._sent[name] += len(piece)
            if orders.cancel:
                break
        return orders

    def finish(self, result: JobOutcome | Lost | None) -> None:
        while self._next_piece()[0] is not None:
            self.beat()
        is_stopped = isinstance(result, Lost) and result.is_shutdown
        finish = Finish(
            outcome=result if isinstance(result, JobOutcome) else None,
            lost=_STOPPED if is_stopped else result if isinstance(result, Lost) else None,
            records=_records(self._dir),
        )
        self._post("finish", Finished, timeout=_RELEASE_SECONDS, content=finish.model_dump_json())

    def _offset(self, name: str) -> int:
        return self.started.sizes.get(name, 0) + self._sent[name]

    def _next_piece(self) -> tuple[str | None, bytes]:
        for name in GROWING:
            with suppress(FileNotFoundError), (self._dir / name).open("rb") as file:
                file.seek(self._sent[name])
                if piece := file.read(PIECE_BYTES):
                    return name, piece
        return None, b""

    def _post(self, call: str, kind: type[Message], **request: Any) -> Message:
        where = f"{self._url}/{call}"
        try:
            answer = self._http.post(where, **request)
        except httpx.HTTPError as error:
            raise StoreError(f"The hub does not answer at {where}: {error!r}.") from error
        said = f"{where}: {answer.status_code}: {answer.text[:500]}"
        if answer.status_code in (401, 409):
            logger.warning("%s", said)
            raise LeaseLost(self._url, "this agent")
        try:
            return kind.model_validate_json(answer.raise_for_status().content)
        except (httpx.HTTPStatusError, ValidationError) as error:
            # Perhaps a proxy answers while the hub is away.
            raise StoreError(f"The hub does not answer as it should: {said}") from error


def _records(job_dir: Path) -> dict[str, str]:
    """The records that have room in one call, the smallest first."""
    records, room = {}, _MAX_RECORDS_BYTES
    paths = [each for each in job_dir.glob("*.json") if is_record(each.name) and each.is_file()]
    for path in sorted(paths, key=lambda each: each.stat().st_size):
        room -= path.stat().st_size
        if room >= 0:
            records[path.name] = path.read_text(errors="replace")
    return records


def is_record(name: str) -> bool:
    """Whether this is a file that a job's command may write, for people and `pipeline` to read."""
    return _RECORD.fullmatch(name) is not None and name not in (IDENTITY, SPEC, PAYLOAD)


def _client(token: str) -> httpx.Client:
    return httpx.Client(headers={"Authorization": f"Bearer {token}"}, timeout=_ANSWER_SECONDS)
