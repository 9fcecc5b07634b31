"""What goes wrong in serving.

ServingError                the command line prints it in one line
├── ReleaseError            a release folder is not what it should be; `reasons` has all of it
│   └── NotEnoughSpace      the disk is too small for one more release
└── PortBusy                somebody else listens there
"""


class ServingError(Exception):
    """Serving cannot go on; the message is for the person at the terminal."""


class ReleaseError(ServingError):
    """A release or checkpoint folder cannot be published, read or served."""

    def __init__(self, *reasons: str) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons
        """Each names the file, and the tensor where there is one."""


class NotEnoughSpace(ReleaseError):
    """The disk cannot take another release. Nothing was left behind."""


class PortBusy(ServingError):
    def __init__(self, host: str, port: int) -> None:
        super().__init__(
            f"{host}:{port} is taken by another program; "
            "choose another port with --port or [serving] port"
        )
