"""Requests to a server on loopback that a page of another site has caused."""

import pytest

from serving.http.server import other_host


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("localhost:8000", True),
        ("LOCALHOST.", True),
        ("app.localhost:8000", True),
        ("127.0.0.2", True),
        ("[::1]:8000", True),
        ("own.example:8000", True),
        ("", True),
        ("page.example:8000", False),
        ("notlocalhost", False),
        ("localhost.page.example", False),
        ("127.0.0.1.page.example", False),
        ("[::", False),
    ],
)
def test_a_host_on_loopback_is_one_of_loopback_or_a_name_of_the_server(
    host: str, is_own: bool
) -> None:
    found = other_host({"host": host}, ("127.0.0.1", 8000), {"own.example"})
    assert found == (None if is_own else host)


def test_a_server_on_another_address_has_any_name() -> None:
    assert other_host({"host": "page.example"}, ("192.0.2.7", 8000), ()) is None
    assert other_host({}, ("127.0.0.1", 8000), ()) is None
