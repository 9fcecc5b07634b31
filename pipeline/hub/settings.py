"""What the embedded hub is told: where it listens, who owns it, how patiently it delivers."""

from pydantic import BaseModel, ConfigDict, Field

GIB = 1024**3


class HubSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """The address that the hub listens on; clients must use this very name."""
    port: int = Field(default=8070, ge=1, le=65535)
    owner: str = Field(default="local", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}$")
    """The name that `whoami` gives, and the namespace of a repository that names none."""
    delivery_schedule_seconds: tuple[float, ...] = Field(
        default=(0, 5, 30, 120, 600, 1800, 7200, 18000, 36000, 36000), min_length=1
    )
    """The wait before each attempt, the first included; after the last one a delivery is dead."""
    delivery_jitter: float = Field(default=0.2, ge=0, lt=1)
    """Each wait is made longer or shorter by up to this share, so that retries spread out."""
    delivery_timeout_seconds: float = Field(default=15, gt=0)
    """For a whole attempt, from connecting to the last byte of the answer."""
    suspend_after_failures: int = Field(default=10, ge=1)
    """Attempts that fail in a row before a webhook is suspended: its deliveries then wait, using up
    no attempt, while one of them is sent now and then to see whether the receiver is back."""
    probe_min_seconds: float = Field(default=60, gt=0)
    """The wait before a suspended webhook is tried for the first time …"""
    probe_max_seconds: float = Field(default=3600, gt=0)
    """… doubling up to this."""
    refused_min_seconds: float = Field(default=0.5, gt=0)
    """A loopback receiver that refuses connections is just starting: it is tried this soon …"""
    refused_max_seconds: float = Field(default=5, gt=0)
    """… doubling up to this. Such a try does not use up an attempt."""
    refused_give_up_seconds: float = Field(default=48 * 3600, gt=0)
    """A delivery that met nothing but refused connections for this long is dead."""
    deliver_job_commits: bool = False
    """Whether a push fires whose new commits were all made by jobs. A job that commits to a dataset
    that is followed would then start the next job, and that one another."""
    keep_deliveries_days: float = Field(default=30, gt=0)
    """How long a delivery that ended, delivered or dead, can be looked at and replayed."""
    reconcile_seconds: float = Field(default=60, gt=0)
    """How often refs are compared with the events stored, beside after every push and at start."""
    max_push_bytes: int = Field(default=4 * GIB, gt=0)
    """The largest pack that one push may send."""
    max_git_processes: int = Field(default=16, ge=1)
    """Clones that run at a time, and as many pushes beside them; later ones wait."""

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"
