"""What goes wrong in serving.

ServingError                the command line prints it in one line
├── ReleaseError            a release folder is not what it should be; `reasons` has all of it
│   └── NotEnoughSpace      the disk is too small for one more release
├── SwapAnswerError         what answered `/admin/swap` is not this pipeline's server
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


class SwapAnswerError(ServingError):
    """The answer to a swap request is no `SwapResult`."""

    def __init__(self, url: str, status_code: int, text: str) -> None:
        super().__init__(f"{url} answered {status_code}: {text[:300].strip() or '(nothing)'}")


class PortBusy(ServingError):
    def __init__(self, host: str, port: int) -> None:
        super().__init__(
            f"{host}:{port} is taken by another program; "
            "choose another port with --port or [serving] port"
        )
