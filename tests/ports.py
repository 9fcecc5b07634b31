"""Free ports to name in settings, for servers that are started later."""

import random
import socket
from contextlib import ExitStack

# Below the ports that systems give to whoever asks for any: such a port could be given to another
# test before the server that it was chosen for has taken it.
_CHOICE = range(15_000, 32_000)


def free_ports(count: int) -> list[int]:
    """Distinct ports that nothing listens on."""
    dice = random.SystemRandom()  # what seeds the others gives every process the same ports
    ports: list[int] = []
    with ExitStack() as probes:
        while len(ports) < count:
            port = dice.choice(_CHOICE)
            probe = probes.enter_context(socket.socket())
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            ports.append(port)
    return ports


def free_port() -> int:
    return free_ports(1)[0]
