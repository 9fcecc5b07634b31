"""Large files through the Hub's own client, and what is refused of clients that are none."""

import hashlib
import random
import time
from collections.abc import Iterator

import httpx
import pytest
from huggingface_hub import constants

from pipeline.hub.routes.large_files import GRANT_SECONDS
from tests.hub_fixtures import RunningHub, running_hub
from tests.uploads_fixtures import files_of, name, upload_large_files

__all__ = ["name"]

# What the client itself does when it sends a file without Xet.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

CONTENT = random.Random(17).randbytes(3_000_000)  # the same in each process of the tests
OID = hashlib.sha256(CONTENT).hexdigest()
BATCH = ".git/info/lfs/objects/batch"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    with running_hub(tmp_path_factory.mktemp("large") / "hub", max_push_bytes=10_000_000) as hub:
        yield hub


@pytest.fixture
def no_xet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)


def batch(
    hub: RunningHub, name: str, *objects: dict[str, object], operation: str = "upload"
) -> httpx.Response:
    body = {"operation": operation, "objects": objects}
    return hub.request("POST", f"/datasets/{name}{BATCH}", json=body)


def href(hub: RunningHub, name: str, operation: str = "upload", oid: str = OID) -> str:
    size = len(CONTENT)
    [told] = batch(hub, name, {"oid": oid, "size": size}, operation=operation).json()["objects"]
    found: str = told["actions"][operation]["href"]
    return found


def put(url: str, content: bytes = CONTENT, method: str = "PUT") -> httpx.Response:
    """Without the token: the URL is the proof."""
    return httpx.request(method, url, content=content, timeout=60, verify=False)


@pytest.mark.usefixtures("no_xet")
def test_the_client_without_xet_sends_each_file_once(hub: RunningHub, name: str) -> None:
    upload_large_files(hub, name, CONTENT, b"x" * 500)
    files = files_of(hub, name)
    assert set(files.oids()) == {OID, hashlib.sha256(b"x" * 500).hexdigest()}
    assert files.path(OID).read_bytes() == CONTENT
    before = files.path(OID).stat().st_ino
    upload_large_files(hub, name, CONTENT)
    assert files.path(OID).stat().st_ino == before
    assert list(files.incoming.iterdir()) == []


def test_a_file_is_fetched_by_its_signed_url_also_in_ranges(hub: RunningHub, name: str) -> None:
    assert put(href(hub, name)).status_code == 200
    url = href(hub, name, "download")
    assert put(url, b"", "GET").content == CONTENT
    part = httpx.get(url, headers={"Range": "bytes=2000000-2000009"}, verify=False)
    assert (part.status_code, part.content) == (206, CONTENT[2_000_000:2_000_010])
    assert httpx.get(url, headers={"Range": "bytes=3000000-"}, verify=False).status_code == 416


def test_a_file_that_can_never_come_is_refused_alone(hub: RunningHub, name: str) -> None:
    wanted, good = {"oid": OID, "size": 10_000_001}, {"oid": "0" * 64, "size": 3}
    told, fine = batch(hub, name, wanted, good).json()["objects"]
    assert (told["error"]["code"], "max_push_bytes" in told["error"]["message"]) == (422, True)
    assert "upload" in fine["actions"]


def test_a_file_that_is_not_here_is_told(hub: RunningHub, name: str) -> None:
    [told] = batch(hub, name, {"oid": OID, "size": 3}, operation="download").json()["objects"]
    assert told["error"]["code"] == 404
    size = len(CONTENT)
    actions = batch(hub, name, {"oid": OID, "size": size}).json()["objects"][0]["actions"]
    assert put(actions["upload"]["href"]).status_code == 200
    assert batch(hub, name, {"oid": OID, "size": size}).json()["objects"] == [
        {"oid": OID, "size": size}
    ]
    [told] = batch(hub, name, {"oid": OID, "size": size + 1}).json()["objects"]
    assert (told["error"]["code"], f"has {size} bytes" in told["error"]["message"]) == (422, True)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"operation": "steal", "objects": []}, 400),
        ({"operation": "upload"}, 400),
        ({"operation": "upload", "objects": [{"oid": OID, "size": -1}]}, 400),
        ({"operation": "upload", "objects": [{"oid": OID.upper(), "size": 3}]}, 400),
        ({"operation": "upload", "objects": [{"oid": "../" * 20 + "abcd", "size": 3}]}, 400),
        ({"operation": "upload", "objects": [], "hash_algo": "sha512"}, 400),
        ({"operation": "upload", "objects": [{"oid": OID, "size": 1}] * 10_001}, 400),
        ({"operation": "upload", "objects": [{"oid": OID, "size": 1}] * 20_000}, 413),
    ],
)
def test_a_batch_that_is_none_is_refused_in_the_words_that_git_lfs_prints(
    hub: RunningHub, name: str, body: dict[str, object], status: int
) -> None:
    answer = hub.request("POST", f"/datasets/{name}{BATCH}", json=body)
    assert answer.status_code == status
    assert answer.json()["message"] == answer.json()["error"] != ""


def test_a_batch_of_ten_thousand_files_is_answered(hub: RunningHub, name: str) -> None:
    wanted = [{"oid": f"{number:064x}", "size": 1} for number in range(10_000)]
    told = batch(hub, name, *wanted).json()["objects"]
    assert len({each["actions"]["upload"]["href"] for each in told}) == 10_000


def test_a_url_is_good_for_what_was_signed_and_nothing_else(hub: RunningHub, name: str) -> None:
    other = f"{name}x"
    hub.create_dataset(other)
    url, of_other = href(hub, name), href(hub, other)
    path, _, query = url.partition("?")
    forged = [
        path,
        f"{path}?{query[:-9]}{'0' if query[-9] != '0' else '1'}{query[-8:]}",
        f"{path}?{query.replace('size=3000000', 'size=3000001')}",
        f"{path}?{query.replace('size=', 'size=٣')}",
        f"{path.replace(OID, '0' * 64)}?{query}",
        f"{of_other.partition('?')[0]}?{query}",
        f"{of_other.partition('?')[0]}?{of_other.partition('?')[2]}".replace(OID, OID.upper()),
    ]
    for each in forged:
        answer = put(each)
        assert (answer.status_code, "signature of this URL" in answer.text) == (403, True), each
        # Nor does the hub's token open what is not signed.
        with_token = {"Authorization": f"Bearer {hub.token}"}
        assert httpx.put(each, headers=with_token, verify=False).status_code == 403
    assert put(url, b"", "GET").status_code == 403
    assert put(url).status_code == 200
    assert put(url, b"", "GET").status_code == 403
    assert list(files_of(hub, other).oids()) == []


def test_a_url_expires(hub: RunningHub, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = href(hub, name)
    later = time.time() + GRANT_SECONDS + 1
    monkeypatch.setattr(time, "time", lambda: later)
    answer = put(url)
    assert (answer.status_code, "it has expired" in answer.json()["error"]) == (403, True)


def test_a_repository_that_is_moved_takes_its_files_along(hub: RunningHub, name: str) -> None:
    url = href(hub, name)
    assert put(url).status_code == 200
    hub.api.move_repo(name, f"{name}-moved", repo_type="dataset")
    files = files_of(hub, f"{name}-moved")
    assert files.size(OID) == len(CONTENT)
    # The URL names the repository by its id, which stays.
    assert put(url).status_code == 200
    hub.api.delete_repo(f"{name}-moved", repo_type="dataset")
    assert put(url).status_code == 404
    assert not files.path(OID).exists()
