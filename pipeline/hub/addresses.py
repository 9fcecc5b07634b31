"""Where a URL's host leads, and where a webhook may never call: link-local and metadata addresses.

Those answer whoever asks from this machine, with the credentials of the machine itself.
Loopback and private networks are allowed: that is where the receivers of a hub like this are.
"""

import asyncio
import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from pipeline.hub.errors import HubError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# Metadata services that are outside the link-local ranges.
_METADATA = frozenset(
    ipaddress.ip_address(text)
    for text in (
        "fd00:ec2::254",  # Amazon
        "fd20:ce::254",  # Google
        "100.100.100.200",  # Alibaba
        "168.63.129.16",  # Azure
        "192.0.0.192",  # Oracle
    )
)
# Apart from all other threads: a name server that does not answer holds one for half a minute.
_resolvers = ThreadPoolExecutor(64, thread_name_prefix="resolve")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class Unreachable(HubError):
    """The host of a webhook's URL leads nowhere, or where no webhook may call."""


def is_forbidden(address: Address) -> bool:
    """Also in the forms that carry an IPv4 address inside an IPv6 one."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None and is_forbidden(inner):
            return True
        # Without the zone of a link-local address, so that it cannot hide one.
        address = ipaddress.IPv6Address(int(address))
    return address.is_link_local or address.is_multicast or address in _METADATA


def literal(host: str) -> Address | None:
    """The address that `host` itself is; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def check_literal(host: str) -> None:
    """Raises ValueError where `host` is itself an address that no webhook may call."""
    address = literal(host)
    if address is not None and is_forbidden(address):
        raise ValueError(_refusal(host, address))


async def resolve(host: str, port: int) -> tuple[Address, ...]:
    """Every address of `host`, in the order to try them.

    Raises Unreachable where there is none, and where any of them is forbidden: a name that leads
    to such an address as well is not one to trust.
    """
    address = literal(host)
    found: tuple[Address, ...]
    if address is not None:
        found = (address,)
    else:
        loop = asyncio.get_running_loop()
        try:
            look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
            answers = await loop.run_in_executor(_resolvers, look_up)
        except (OSError, UnicodeError) as error:
            raise Unreachable(f"{host!r} has no address ({error}).") from None
        found = tuple(ipaddress.ip_address(answer[4][0]) for answer in answers)
    for address in found:
        if is_forbidden(address):
            raise Unreachable(_refusal(host, address))
    return found


def _refusal(host: str, address: Address) -> str:
    leads = "is" if host == str(address) else f"leads to {address},"
    return f"{host} {leads} a link-local or metadata address, which no webhook may call"
