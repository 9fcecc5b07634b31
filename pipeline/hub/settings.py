"""What the embedded hub is told: where it listens, who owns it, how patiently it delivers."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

GIB = 1024**3

OwnerName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}$")]


class HubSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """The address to listen on. Clients must use exactly this name."""
    port: int = Field(default=8070, ge=1, le=65535)
    """The port to listen on."""
    owner: OwnerName = "local"
    """The user name that `whoami` answers, and the owner of a repository named without one."""
    orgs: tuple[OwnerName, ...] = ()
    """The organizations that `whoami` answers. Repositories can be created under their names."""
    public_reads: bool = False
    """Whether anybody who reaches this address may read, without a token, the repositories whose
    visibility is `public`. All others always need a token."""
    delivery_schedule_seconds: tuple[float, ...] = Field(
        default=(0, 5, 30, 120, 600, 1800, 7200, 18000, 36000, 36000), min_length=1
    )
    """The wait before each attempt, including the first. After the last one a delivery is dead."""
    delivery_jitter: float = Field(default=0.2, ge=0, lt=1)
    """Each wait is lengthened or shortened by up to this share, so that retries spread out."""
    delivery_timeout_seconds: float = Field(default=15, gt=0)
    """Time limit of an attempt, from connecting to the last byte of the answer."""
    suspend_after_failures: int = Field(default=3, ge=1)
    """A webhook is suspended when this many deliveries fail in a row, however often each is tried,
    …"""
    suspend_after_seconds: float = Field(default=300, ge=0)
    """… and no attempt has succeeded for this long. The deliveries of a suspended webhook wait and
    use up no attempt. From time to time one is sent, to see whether the receiver is back."""
    probe_min_seconds: float = Field(default=60, gt=0)
    """How long a suspended webhook waits before the first such try. The wait doubles …"""
    probe_max_seconds: float = Field(default=3600, gt=0)
    """… up to this."""
    refused_min_seconds: float = Field(default=0.5, gt=0)
    """A loopback receiver that refuses connections is probably starting. It is tried again this
    soon; the wait doubles …"""
    refused_max_seconds: float = Field(default=5, gt=0)
    """… up to this. Such a try does not use up an attempt."""
    refused_give_up_seconds: float = Field(default=48 * 3600, gt=0)
    """A delivery is dead when all its connections were refused for this long."""
    deliver_job_commits: bool = False
    """Whether webhooks are sent for a push whose new commits all come from jobs. If so, a job that
    commits to a followed dataset starts another job, without end."""
    keep_deliveries_days: float = Field(default=30, gt=0)
    """How long a delivery is kept after it was delivered or is dead, to be listed and replayed."""
    reconcile_seconds: float = Field(default=60, gt=0)
    """How often the refs are compared with the stored events. This happens at start and after every
    push too."""
    max_push_bytes: int = Field(default=4 * GIB, gt=0)
    """The largest pack that one push may send, and the largest file of Git LFS."""
    max_git_processes: int = Field(default=16, ge=1)
    """How many clones may run at once, and as many pushes beside them. Later ones wait. A clone is
    ended if its client reads nothing for a minute."""

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"
