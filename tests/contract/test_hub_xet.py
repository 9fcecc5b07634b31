"""`hf_xet` sends files to the hub, and what the hub refuses of a client that is none."""

import hashlib
import os
import random
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import lz4.frame
import pytest
from cryptography.fernet import Fernet
from huggingface_hub.utils import _xet

from pipeline.hub import xet
from pipeline.hub.routes.large_files import GRANT_SECONDS
from pipeline.hub.service import grant
from pipeline.hub.xet import list_chunks
from tests.hub_fixtures import RunningHub, running_hub
from tests.uploads_fixtures import files_of, name, upload_large_files

__all__ = ["name"]

MAX_FILE_BYTES = 200_000_000
CONTENT = random.Random(17).randbytes(100_000)  # the same in each process of the tests


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    folder = tmp_path_factory.mktemp("xet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_XET_CACHE", str(folder / "cache"))
        patch.setenv("HF_HOME", str(folder / "home"))
        patch.setattr(_xet, "_GLOBAL_XET_HOLDER", _xet.XetSessionHolder())
        with running_hub(folder / "hub", max_push_bytes=MAX_FILE_BYTES) as hub:
            yield hub


def xorbs_of(hub: RunningHub, name: str) -> dict[str, int]:
    found = (hub.folder(name) / "lfs" / "xet").glob("*/*")
    return {path.name: path.stat().st_size for path in found}


def upload(hub: RunningHub, name: str, *contents: bytes | Path) -> None:
    upload_large_files(hub, name, *contents)
    for content in contents:
        content = content if isinstance(content, bytes) else content.read_bytes()
        oid = hashlib.sha256(content).hexdigest()
        assert files_of(hub, name).path(oid).read_bytes() == content


def access(hub: RunningHub, name: str) -> tuple[str, dict[str, str]]:
    """The address of the store, and the headers of a client that may send to it."""
    told = hub.request("GET", f"/api/datasets/{name}/xet-write-token/main").json()
    return told["casUrl"], {"Authorization": f"Bearer {told['accessToken']}"}


def post(url: str, content: bytes, headers: dict[str, str]) -> httpx.Response:
    return httpx.post(url, content=content, headers=headers, timeout=60, verify=False)


def send_xorb(hub: RunningHub, name: str, xorb: bytes, hash: str) -> httpx.Response:
    url, headers = access(hub, name)
    return post(f"{url}/v1/xorbs/default/{hash}", xorb, headers)


def send_shard(hub: RunningHub, name: str, shard: bytes) -> httpx.Response:
    url, headers = access(hub, name)
    return post(f"{url}/v1/shards", shard, headers)


def chunk(data: bytes, *, scheme: int = 0, size: int | None = None, version: int = 0) -> bytes:
    size = len(data) if size is None else size
    sizes = len(data).to_bytes(3, "little"), size.to_bytes(3, "little")
    return bytes([version]) + sizes[0] + bytes([scheme]) + sizes[1] + data


def swapped(hex: str) -> bytes:
    """As a shard has a hash."""
    return struct.pack("<4Q", *(int(hex[at : at + 16], 16) for at in range(0, 64, 16)))


def shard(terms: Sequence[tuple[str, int, int, int]], sha256: str | None) -> bytes:
    flags = 0 if sha256 is None else 1 << 30
    tag = b"HFRepoMetaData\0" + bytes.fromhex("556967456a7b815783a5bdd95ccdd14aa9")
    parts = [tag, struct.pack("<QQ", 2, 0), bytes(32), struct.pack("<IIQ", flags, len(terms), 0)]
    for xorb, num_bytes, start, end in terms:
        parts += [swapped(xorb), struct.pack("<4I", 0, num_bytes, start, end)]
    if sha256 is not None:
        parts += [swapped(sha256), bytes(16)]
    return b"".join([*parts, b"\xff" * 32, bytes(16)])


XORB = chunk(CONTENT[:60_000]) + chunk(CONTENT[60_000:])
HASH = "0123456789abcdef" * 4  # which the hub does not compute
OID = hashlib.sha256(CONTENT).hexdigest()


def test_files_of_every_kind_come_whole(hub: RunningHub, name: str, tmp_path: Path) -> None:
    text = "".join(f'{{"text": "row number {number}"}}\n' for number in range(50_000)).encode()
    numbers = b"".join(struct.pack("<f", number * 0.001) for number in range(100_000))
    (tmp_path / "noise").write_bytes(os.urandom(1_000_000))
    upload(hub, name, text, numbers, tmp_path / "noise", b"x", text[:1000])
    schemes = set()
    for path in (hub.folder(name) / "lfs" / "xet").glob("*/*"):
        with path.open("rb") as file:
            schemes |= {each.scheme for each in list_chunks(file)}
    assert schemes == {0, 1, 2}, "not packed, LZ4, and LZ4 of grouped bytes"
    assert list(files_of(hub, name).incoming.iterdir()) == []


def test_what_is_there_already_is_not_sent_again(hub: RunningHub, name: str) -> None:
    first = os.urandom(3_000_000)
    upload(hub, name, first)
    before = xorbs_of(hub, name)
    upload(hub, name, first)
    assert xorbs_of(hub, name) == before
    upload(hub, name, first[:1_500_000] + b"something else" * 1000 + first[1_500_000:])
    new = xorbs_of(hub, name).keys() - before.keys()
    assert 0 < sum(xorbs_of(hub, name)[hash] for hash in new) < 1_000_000


def test_a_client_sends_again_what_the_hub_has_emptied(hub: RunningHub, name: str) -> None:
    content = os.urandom(500_000)
    upload(hub, name, content)
    before, _ = access(hub, name)
    files = files_of(hub, name)
    files.remove(files.oids())
    xet.empty(hub.folder(name), grace_seconds=3600)
    assert access(hub, name)[0] == before, "an upload may have begun"
    xet.empty(hub.folder(name), grace_seconds=0)
    assert xorbs_of(hub, name) == {}
    assert access(hub, name)[0] != before
    upload(hub, name, content)


def test_a_hub_that_lost_a_xorb_gets_it_by_the_next_upload(hub: RunningHub, name: str) -> None:
    """As one that was restored from an older backup; the client has noted what it sent."""
    content = os.urandom(500_000)
    upload(hub, name, content)
    files = files_of(hub, name)
    files.remove(list(files.oids()))
    for path in (hub.folder(name) / "lfs" / "xet").glob("*/*"):
        path.unlink()
    with pytest.raises(ConnectionError, match="400 Bad Request"):
        upload(hub, name, content)
    upload(hub, name, content)


def test_a_shard_that_names_a_missing_xorb_disturbs_no_other_upload(
    hub: RunningHub, name: str
) -> None:
    url, headers = access(hub, name)
    refused = send_shard(hub, name, shard([("ab" * 32, 10, 0, 1)], None))
    assert refused.status_code == 400 and "does not have the xorb" in refused.text
    assert post(f"{url}/v1/xorbs/default/{HASH}", XORB, headers).status_code == 200
    assert access(hub, name)[0] != url, "the client of that shard sends everything to this one"
    terms = [(HASH, 100_000, 0, 2)]
    assert post(f"{url}/v1/shards", shard(terms, OID), headers).json() == {"result": 1}
    assert files_of(hub, name).path(OID).read_bytes() == CONTENT


def test_a_shard_puts_chunks_together(hub: RunningHub, name: str) -> None:
    assert send_xorb(hub, name, XORB, HASH).json() == {"was_inserted": True}
    turned = CONTENT[60_000:] + CONTENT[:60_000]
    sha256 = hashlib.sha256(turned).hexdigest()
    terms = [(HASH, 40_000, 1, 2), (HASH, 60_000, 0, 1)]
    assert send_shard(hub, name, shard(terms, sha256)).json() == {"result": 1}
    assert files_of(hub, name).path(sha256).read_bytes() == turned
    # Some clients leave the sha256 out.
    assert send_shard(hub, name, shard([(HASH, 100_000, 0, 2)], None)).status_code == 200
    assert files_of(hub, name).path(OID).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("xorb", "reason"),
    [
        (b"", "0 bytes came instead of 100000"),
        (XORB[:-1], "ends within chunk 1"),
        (chunk(CONTENT, version=1), "version 1"),
        (chunk(CONTENT, scheme=3), "compression 3"),
        (chunk(bytes(128 * 1024 + 1)), "announced 100000 bytes and sent more"),
        (chunk(b"x") * 8193, "more than 8192 chunks"),
        (chunk(CONTENT, scheme=1), "cannot be unpacked"),
        (
            chunk(lz4.frame.compress(bytes(10**7)), scheme=1, size=100),
            "101 bytes came instead of 100000",
        ),
        (XORB[:20] + b"x" + XORB[21:], "has the sha256"),
    ],
    ids=range(9),
)
def test_of_what_is_no_xorb_no_file_is_made(
    hub: RunningHub, name: str, xorb: bytes, reason: str
) -> None:
    url, headers = access(hub, name)
    assert post(f"{url}/v1/xorbs/default/{HASH}", xorb, headers).status_code == 200
    answer = send_shard(hub, name, shard([(HASH, 100_000, 0, 2)], OID))
    assert (answer.status_code, reason in answer.json()["error"]) == (400, True), answer.text
    assert list(files_of(hub, name).oids()) == []
    assert list(files_of(hub, name).incoming.iterdir()) == []
    assert access(hub, name)[0] != url, "the client sends the xorb again to this one"


def test_a_xorb_that_is_too_large_is_refused(hub: RunningHub, name: str) -> None:
    assert send_xorb(hub, name, bytes(66 * 1024 * 1024), HASH).status_code == 413
    assert list(files_of(hub, name).incoming.iterdir()) == []


@pytest.mark.parametrize("hash", [HASH.upper(), HASH[1:], "..%2f..%2fconfig", "é"])
def test_a_name_that_is_no_hash_is_refused(hub: RunningHub, name: str, hash: str) -> None:
    assert send_xorb(hub, name, XORB, hash).status_code in (400, 404)
    assert xorbs_of(hub, name) == {}


WHOLE = [(HASH, 100_000, 0, 2)]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "does not begin with the tag"),
        (shard(WHOLE, OID)[1:], "does not begin with the tag"),
        (shard(WHOLE, OID).replace(struct.pack("<QQ", 2, 0), struct.pack("<QQ", 3, 0)), "ver"),
        (shard(WHOLE, OID)[:-48], "ends early"),
        (shard([("0" * 64, 100_000, 0, 2)], OID), f"does not have the xorb {'0' * 64}"),
        (shard([(HASH, 99_999, 0, 2)], OID), "announced 99999 bytes and sent more"),
        (shard([(HASH, 100_000, 0, 9)] * 2, OID), "has the sha256"),
        (shard([(HASH, 1, 7, 9)], OID), "0 bytes came instead of 1"),
        (shard(WHOLE, "0" * 64), "the file changed while it was sent"),
    ],
    ids=range(9),
)
def test_what_is_no_shard_stores_nothing(
    hub: RunningHub, name: str, content: bytes, reason: str
) -> None:
    send_xorb(hub, name, XORB, HASH)
    answer = send_shard(hub, name, content)
    assert (answer.status_code, reason in answer.json()["error"]) == (400, True), answer.text
    assert list(files_of(hub, name).oids()) == []
    assert list(files_of(hub, name).incoming.iterdir()) == []


def test_a_shard_of_a_file_without_end_is_refused_before_it_is_written(
    hub: RunningHub, name: str
) -> None:
    send_xorb(hub, name, XORB, HASH)
    terms = [(HASH, 100_000, 0, 2)] * (MAX_FILE_BYTES // 100_000 + 1)
    answer = send_shard(hub, name, shard(terms, OID))
    assert (answer.status_code, "max_push_bytes" in answer.text) == (413, True)


def test_an_access_token_is_of_one_store_and_ends(
    hub: RunningHub, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = f"{name}x"
    hub.create_dataset(other)
    url, headers = access(hub, name)
    _, of_other = access(hub, other)
    token = headers["Authorization"].removeprefix("Bearer ")
    repository, store = url.split("/")[-2:]
    of_other_key = grant(Fernet.generate_key(), "xet", repository, store)
    forged = [
        {},
        of_other,
        {"Authorization": f"Bearer {hub.token}"},
        {"Authorization": f"Basic {token}"},
        {"Authorization": f"Bearer {token[:-1]}"},
        {"Authorization": f"Bearer {of_other_key}"},
    ]
    for each in forged:
        for path in (f"/v1/xorbs/default/{HASH}", "/v1/shards", "/v1/chunks/default/x", "/"):
            answer = post(f"{url}{path}", XORB, each)
            assert answer.status_code == 401, (each, path)
    assert post(f"{url[:-1]}x/v1/shards", b"", headers).status_code == 401
    assert hub.request("GET", "/api/whoami-v2", headers=headers).status_code == 401
    assert post(f"{url}/v1/xorbs/default/{HASH}", XORB, headers).status_code == 200
    later = time.time() + GRANT_SECONDS + 1
    monkeypatch.setattr(time, "time", lambda: later)
    answer = post(f"{url}/v1/xorbs/default/{HASH}", XORB, headers)
    assert (answer.status_code, "it has expired" in answer.text) == (401, True)


def test_what_else_a_client_asks_is_not_there(hub: RunningHub, name: str) -> None:
    url, headers = access(hub, name)
    for method, path in [
        ("GET", f"/v1/chunks/default/{HASH}"),
        ("POST", f"/v1/xorb-grants/default/{HASH}"),
        ("POST", "/v2/shards"),
        ("GET", f"/v1/reconstructions/{HASH}"),
    ]:
        answer = httpx.request(method, f"{url}{path}", headers=headers, verify=False)
        assert answer.status_code == 404, path
    assert hub.request("GET", f"/api/datasets/{name}/xet-read-token/main").status_code == 501
    path = "/api/datasets/local/none/xet-write-token/main"
    assert hub.request("GET", path).status_code == 404
    assert httpx.get(f"{hub.url}{path}", verify=False).status_code == 401


def test_a_store_that_was_emptied_meanwhile_is_told(hub: RunningHub, name: str) -> None:
    url, headers = access(hub, name)
    xet.empty(hub.folder(name), grace_seconds=0)
    for path in (f"/v1/xorbs/default/{HASH}", "/v1/shards"):
        answer = post(f"{url}{path}", XORB, headers)
        assert (answer.status_code, "start the upload again" in answer.text) == (400, True)
