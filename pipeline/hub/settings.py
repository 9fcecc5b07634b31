"""The settings of the embedded hub."""

from pydantic import BaseModel, ConfigDict, Field

from jobs.spec import LOCAL

GIB = 1024**3


class HubSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """The address to listen on. It is also the host in the URLs of events and of `pipeline env`."""
    port: int = Field(default=8070, ge=1, le=65535)
    """The port to listen on."""
    database: str | None = Field(default=None, pattern=r"^postgresql(\+psycopg)?://")
    """`postgresql://…`: the database of events, webhooks and deliveries, which are then not lost
    with this machine. If unset, it is a file in the state folder. The repositories are in the state
    folder in both cases."""
    owner: str = Field(default="local", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}$")
    """The user name that `whoami` answers. A repository name without an owner means a repository of
    this user."""
    delivery_schedule_seconds: tuple[float, ...] = Field(
        default=(0, 5, 30, 120, 600, 1800, *[3600] * 24), min_length=1
    )
    """One value for each attempt of a delivery: the wait before it. The first attempt is made at
    once, whatever its value is. Later deliveries of the webhook wait too. A delivery is dead when
    its last attempt has failed, after about a day; then the next one follows."""
    delivery_timeout_seconds: float = Field(default=15, gt=0)
    """The time limit of an attempt, from the look-up of the host until the beginning of the answer
    is read."""
    suspend_after_seconds: float = Field(default=300, ge=0)
    """A webhook counts as suspended when all its attempts have failed for this time."""
    refused_seconds: float = Field(default=5, gt=0)
    """A receiver on this machine that refuses connections is probably still starting. The hub tries
    again after half a second, and then after longer and longer waits: this is the longest. A
    refused connection uses up no attempt."""
    keep_deliveries_days: float = Field(default=30, gt=0)
    """For how many days the hub keeps a delivery that is delivered or dead. A person can list and
    replay it in this time."""
    reconcile_seconds: float = Field(default=60, gt=0)
    """The seconds between two comparisons of the refs with the stored events. The hub also compares
    them when it starts and after every push."""
    jobs_launcher: str = LOCAL
    """Where the jobs of clients such as `hf jobs run` run: `local` for this machine, which ignores
    their image, or NAME for the engine of [launchers.NAME], in their image."""
    max_unavailable: int = Field(default=1, ge=1)
    """How many of the servers that follow one pipeline may swap at the same time."""
    max_push_bytes: int = Field(default=4 * GIB, gt=0)
    """The largest pack of one push, the largest body of one commit over the API, and the largest
    file of Git LFS."""
    max_git_processes: int = Field(default=16, ge=1)
    """How many clones may run at once. As many pushes, lists of refs, and files that are sent, may
    run beside them. All others wait. A clone ends if its client does not read for a minute."""

    @property
    def url(self) -> str:
        return http_url(self.host, self.port)


def http_url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
