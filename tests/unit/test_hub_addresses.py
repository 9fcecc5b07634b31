"""Where webhooks may call: resolved once per attempt, never link-local or a metadata service."""

import asyncio
import datetime
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from pipeline.hub import deliveries
from pipeline.hub.deliveries import headers, is_forbidden, resolve
from pipeline.hub.errors import HubError
from pipeline.hub.webhooks import Attempt, Due
from tests.hub_fixtures import recording_receiver
from tests.ports import free_port

DUE = Due(id="d1", payload="{}", attempt=0, queued_at=0)


@pytest.mark.parametrize(
    "text",
    [
        "169.254.169.254",
        "169.254.0.1",
        "fe80::1",
        "fe80::1%lo",
        "fd00:ec2::254",
        "fd00:ec2::23",
        "fd20:ce::254",
        "100.100.100.200",
        "168.63.129.16",
        "::ffff:169.254.169.254",
        "2002:a9fe:a9fe::",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::a9fe:a9fe",
        "2001::5601:5601",
        "224.0.0.1",
    ],
)
def test_what_no_webhook_may_call(text: str) -> None:
    assert is_forbidden(ipaddress.ip_address(text))
    with pytest.raises(HubError, match="no webhook may call"):
        asyncio.run(resolve(text, 80))


@pytest.mark.parametrize("text", ["127.0.0.1", "::1", "10.1.2.3", "192.168.0.9", "8.8.8.8"])
def test_loopback_private_and_public_addresses_may_be_called(text: str) -> None:
    assert not is_forbidden(ipaddress.ip_address(text))
    assert asyncio.run(resolve(text, 80)) == (ipaddress.ip_address(text),)


# An address in another spelling: the resolver knows it as what it is.
@pytest.mark.parametrize("host", ["2852039166", "0xa9fea9fe", "169.254.43518", "0251.0376.0.1"])
def test_a_spelling_hides_no_address(host: str) -> None:
    with pytest.raises(HubError, match="no webhook may call"):
        asyncio.run(resolve(host, 80))


def post(url: str, secret: str | None = None) -> Attempt:
    ending = asyncio.run(deliveries.post(DUE, url, secret, timeout_seconds=5))
    return Attempt(started_at=0, milliseconds=0, **ending)


class Names:
    """Answers for made-up hosts; counts how often each was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **hosts: list[str]) -> None:
        self.asked: list[str] = []
        self.hosts = {f"{name}.test": addresses for name, addresses in hosts.items()}

        real = socket.getaddrinfo

        def getaddrinfo(host: str, port: int, *rest: Any, **options: Any) -> list[Any]:
            if not host.endswith(".test"):
                return real(host, port, *rest, **options)
            self.asked.append(host)
            # A second answer would be another one: a name that is bound anew.
            addresses = self.hosts.pop(host, ["169.254.169.254"])
            return [(None, None, 0, "", (address, port)) for address in addresses]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_the_connection_goes_to_the_address_that_was_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = Names(monkeypatch, receiver=["127.0.0.1"])
    with recording_receiver() as receiver:
        port = receiver.url.split(":")[2].split("/")[0]
        attempt = post(f"http://receiver.test:{port}/x")
    assert attempt.succeeded
    assert names.asked == ["receiver.test"]
    [received] = receiver.received
    assert received.headers["host"] == f"receiver.test:{port}"


def test_the_next_address_is_tried_where_one_does_not_listen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Names(monkeypatch, receiver=["127.0.0.2", "127.0.0.1"])
    with recording_receiver() as receiver:
        port = receiver.url.split(":")[2].split("/")[0]
        assert post(f"http://receiver.test:{port}/").succeeded


def test_a_name_that_also_leads_to_a_forbidden_address_is_not_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Names(monkeypatch, receiver=["127.0.0.1", "169.254.169.254"])
    with recording_receiver() as receiver:
        port = receiver.url.split(":")[2].split("/")[0]
        with pytest.raises(HubError, match=r"leads to 169\.254\.169\.254"):
            post(f"http://receiver.test:{port}/")
    assert receiver.received == []


def test_a_name_without_an_address_is_told() -> None:
    with pytest.raises(HubError, match="has no address"):
        post("http://no-such-host.invalid/")


async def test_names_that_are_not_resolved_hold_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many as a pool of threads that everybody shares has on a large machine."""
    answered, real = threading.Event(), socket.getaddrinfo

    def look_up(host: str, *args: Any, **kwargs: Any) -> Any:
        if host.startswith("slow"):
            assert answered.wait(30)
        return real("127.0.0.1" if host.endswith(".test") else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    slow = [asyncio.create_task(resolve(f"slow{number}.test", 80)) for number in range(32)]
    await asyncio.sleep(0)
    assert await resolve("quick.test", 80) == (ipaddress.ip_address("127.0.0.1"),)
    assert await asyncio.to_thread(lambda: "done") == "done"
    answered.set()
    await asyncio.gather(*slow)


def test_a_signing_secret_is_sent_only_where_nobody_reads_along() -> None:
    signing = "whsec_c2VjcmV0"
    private, public = headers(DUE, signing, True), headers(DUE, signing, False)
    assert private["X-Webhook-Secret"] == signing
    assert "X-Webhook-Secret" not in public
    assert signing not in str(public)
    assert private["webhook-signature"] == public["webhook-signature"]
    assert headers(DUE, "s3cret", False)["X-Webhook-Secret"] == "s3cret", "as the hub sends it"


@contextmanager
def tls_receiver(folder: Path, name: str) -> Iterator[tuple[int, ssl.SSLContext]]:
    """Its port, and a context that trusts its certificate, which is for `name`."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    file = folder / "receiver.pem"
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    file.write_bytes(
        pem
        + key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(HTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # a client that does not trust it

    server = Server(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_address[1], ssl.create_default_context(cadata=pem.decode())
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_certificate_must_be_for_the_name_in_the_url(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Names(monkeypatch, receiver=["127.0.0.1"], impostor=["127.0.0.1"])
    with tls_receiver(tmp_path, "receiver.test") as (port, trusting):
        monkeypatch.setattr(deliveries, "_certificates", lambda: trusting)
        assert post(f"https://receiver.test:{port}/").response_status == 204
        attempt = post(f"https://impostor.test:{port}/")
        assert attempt.error is not None and "mismatch" in attempt.error


def test_only_a_port_on_which_nobody_listens_counts_as_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refused = post(f"http://127.0.0.1:{free_port()}/")
    assert refused.refused and refused.error is not None
    with tls_receiver(tmp_path, "receiver.test") as (port, _):
        # `receiver.test` leads to an address where nobody listens, then to the receiver.
        Names(monkeypatch, receiver=["127.0.0.2", "127.0.0.1"])
        for host in ("127.0.0.1", "receiver.test"):
            untrusted = post(f"https://{host}:{port}/")
            assert not untrusted.refused
            assert untrusted.error is not None and "CERTIFICATE_VERIFY_FAILED" in untrusted.error
