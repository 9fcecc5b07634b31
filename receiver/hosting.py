"""Settings of a receiver that runs in a Space of the Hugging Face Hub. The Space sets environment
variables that say where the receiver must listen, and which URL senders use to reach it."""

import os
import re

from receiver.errors import AddressUnavailable
from receiver.settings import ReceiverSettings, settings_of_the_environment

EVERY_ADDRESS = "0.0.0.0"


def is_space() -> bool:
    """Whether this process runs in a Space."""
    return bool(os.environ.get("SPACE_ID"))


def settings_of_this_process(given: ReceiverSettings | None) -> ReceiverSettings:
    """Returns the settings `given`. If `given` is None, returns the settings of the environment. In
    a Space, `host`, `port` and `public_url` get the values that the Space needs, unless they are
    set. Raises `AddressUnavailable` if an environment variable is not a valid port or host name."""
    settings = given or settings_of_the_environment()
    if not is_space():
        return settings
    update: dict[str, object] = {}
    if "host" not in settings.model_fields_set:
        update["host"] = os.environ.get("GRADIO_SERVER_NAME") or EVERY_ADDRESS
    if "port" not in settings.model_fields_set:
        update["port"] = settings_of_the_environment().port
    if settings.public_url is None and (host := os.environ.get("SPACE_HOST")):
        if not re.fullmatch(r"[A-Za-z0-9.-]+(:\d+)?", host):
            raise AddressUnavailable(f"SPACE_HOST={host!r} is not a host name.")
        update["public_url"] = f"https://{host}"
    return settings.model_copy(update=update)
