"""Opens the socket on which a service listens. Every function raises OSError: `socket.gaierror` if
the host has no address."""

import ipaddress
import os
import socket

_Address = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int]]


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that already listens. So clients can connect before the server is up. Such clients
    wait until the server answers. An empty `host` means every address of this machine."""
    # If a name such as localhost has addresses of both families, take IPv4: some clients connect
    # only to 127.0.0.1.
    family, _, _, _, address = min(_resolve(host, port), key=lambda each: each[0] != socket.AF_INET)
    # Nagle's algorithm can delay an answer by 40 ms. asyncio turns it off, but only for a socket
    # that was made with IPPROTO_TCP, so pass this protocol.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except BaseException:
        listening.close()
        raise
    return listening


def is_only_loopback(host: str) -> bool:
    """Whether no other machine can reach a server that listens on `host`."""
    addresses = {entry[4][0] for entry in _resolve(host, 0)}
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


def _resolve(host: str, port: int) -> list[_Address]:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return found  # type: ignore[return-value]  # stream sockets over IP only
