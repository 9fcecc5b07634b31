"""Resolves the host of a webhook's URL, and refuses link-local, multicast and metadata addresses.

A metadata service gives the credentials of this machine to every process on it, so no webhook may
call one. Addresses of loopback and of private networks are allowed, because the receivers are
usually there.
"""

import asyncio
import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from pipeline.hub.errors import HubError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# Addresses of cloud metadata services that are not link-local.
_METADATA = frozenset(
    ipaddress.ip_address(text)
    for text in (
        "fd00:ec2::254",  # Amazon
        "fd00:ec2::23",  # Amazon, for pods of EKS
        "fd20:ce::254",  # Google
        "100.100.100.200",  # Alibaba
        "168.63.129.16",  # Azure
        "192.0.0.192",  # Oracle
    )
)
# Names are looked up in separate threads, because a name server that does not answer blocks a
# thread for half a minute.
_resolvers = ThreadPoolExecutor(64, thread_name_prefix="resolve")
_NAT64 = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("64:ff9b:1::/48"))


class Unreachable(HubError):
    """The host of a webhook's URL has no address, or an address that no webhook may call."""


def is_forbidden(address: Address) -> bool:
    """Whether no webhook may call this address. An IPv6 address is also forbidden if it contains
    a forbidden IPv4 address."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if any(address in network for network in _NAT64):
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if any(each is not None and is_forbidden(each) for each in inner):
            return True
        # Remove the zone (`%eth0`): an address with a zone equals none in `_METADATA`.
        address = ipaddress.IPv6Address(int(address))
    return address.is_link_local or address.is_multicast or address in _METADATA


def check_literal(host: str) -> None:
    """Raises ValueError if `host` is an address, not a name, and no webhook may call it."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return
    if is_forbidden(address):
        raise ValueError(_refusal(host, address))


async def resolve(host: str, port: int) -> tuple[Address, ...]:
    """All addresses of `host`, which may also be an address, in the order in which to try them.

    Raises Unreachable if `host` has no address, or if any of its addresses is forbidden. A name
    that has a forbidden address cannot be trusted, even if its other addresses are allowed.
    """
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        answers = await asyncio.get_running_loop().run_in_executor(_resolvers, look_up)
    except (OSError, UnicodeError) as error:
        raise Unreachable(f"{host!r} has no address ({error}): check the URL.") from None
    found = tuple(ipaddress.ip_address(answer[4][0]) for answer in answers)
    for address in found:
        if is_forbidden(address):
            raise Unreachable(_refusal(host, address))
    return found


def _refusal(host: str, address: Address) -> str:
    leads = "is" if host == str(address) else f"leads to {address},"
    return f"{host} {leads} a link-local, multicast or metadata address: no webhook may call it"
