"""The settings of the embedded hub."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

GIB = 1024**3

OwnerName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}$")]


class HubSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """The address to listen on. It is also the host in the URLs of events and of `pipeline env`."""
    port: int = Field(default=8070, ge=1, le=65535)
    """The port to listen on."""
    owner: OwnerName = "local"
    """The user name that `whoami` answers. A repository name without an owner means a repository of
    this user."""
    orgs: tuple[OwnerName, ...] = ()
    """The organizations that `whoami` answers. A repository may have any other owner too."""
    public_reads: bool = False
    """Whether anybody who reaches this address may read public repositories without a token. A
    request to a private repository always needs a token."""
    delivery_schedule_seconds: tuple[float, ...] = Field(
        default=(0, 5, 30, 120, 600, 1800, 7200, 18000, 36000, 36000), min_length=1
    )
    """The wait before each attempt, including the first. A delivery is dead when its last attempt
    has failed."""
    delivery_jitter: float = Field(default=0.2, ge=0, lt=1)
    """Each wait is lengthened or shortened by up to this share, so that retries spread out."""
    delivery_timeout_seconds: float = Field(default=15, gt=0)
    """The time limit of an attempt, from the look-up of the host until the beginning of the answer
    is read."""
    suspend_after_failures: int = Field(default=3, ge=1)
    """A webhook is suspended when this many different deliveries have failed and none has succeeded
    for `suspend_after_seconds`. A delivery counts once, however often it was tried."""
    suspend_after_seconds: float = Field(default=300, ge=0)
    """How long all attempts of a webhook must have failed before the webhook is suspended. The
    deliveries of a suspended webhook wait and use up no attempt. From time to time the hub sends
    one of them as a probe, to see whether the receiver works again."""
    probe_min_seconds: float = Field(default=60, gt=0)
    """How long a suspended webhook waits before its first probe. The wait doubles after each probe
    that fails."""
    probe_max_seconds: float = Field(default=3600, gt=0)
    """The longest wait before a probe."""
    refused_min_seconds: float = Field(default=0.5, gt=0)
    """A receiver on this machine that refuses connections is probably still starting. The hub tries
    again after this wait, which doubles each time. A refused connection uses up no attempt."""
    refused_max_seconds: float = Field(default=5, gt=0)
    """The longest wait after a refused connection."""
    refused_give_up_seconds: float = Field(default=48 * 3600, gt=0)
    """A delivery is dead if the receiver still refuses connections this long after the event, or
    after a person replayed the delivery."""
    deliver_job_commits: bool = False
    """Whether webhooks also get a push whose new commits all come from jobs. If this is true, a job
    that commits to the dataset that it follows starts another job, and so on without end."""
    keep_deliveries_days: float = Field(default=30, gt=0)
    """For how many days the hub keeps a delivery that is delivered or dead. A person can list and
    replay it in this time."""
    reconcile_seconds: float = Field(default=60, gt=0)
    """The seconds between two comparisons of the refs with the stored events. The hub also compares
    them when it starts and after every push."""
    max_push_bytes: int = Field(default=4 * GIB, gt=0)
    """The largest pack of one push, the largest body of one commit over the API, and the largest
    file of Git LFS."""
    max_git_processes: int = Field(default=16, ge=1)
    """How many clones may run at once. The same number of pushes may run beside them. All others
    wait. The hub ends a clone if its client does not read for a minute."""

    @property
    def url(self) -> str:
        return http_url(self.host, self.port)


def http_url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
