"""A release is a revision of the model repository `local/<pipeline>`, for unmodified clients."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub.errors import RevisionNotFoundError
from safetensors.torch import load_file

from pipeline.doctor.checks import check_push_to, faults
from pipeline.doctor.facts import Facts
from pipeline.hub.database import open_database
from pipeline.hub.events import EventLog
from pipeline.hub.large_files import LargeFiles
from pipeline.hub.releases import Releases, take_release
from pipeline.hub.repositories import Repositories
from pipeline.paths import Home
from pipeline.settings import PipelineSettings, Settings
from pipeline.stack.push_to import pushing
from serving.errors import ReleaseError
from serving.weights.release import RELEASE_FILE, Release
from serving.weights.release_store import Served, load_release, prune, set_back, set_current
from serving.weights.verify import verify_release
from tests.hub_fixtures import Receiver, RunningHub, running_hub
from tests.serving_fixtures import echo_release, network_release

pytest_plugins = ["tests.hub_plugin"]

REPO = "local/notes"


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    return tmp_path / "releases" / "notes"


@pytest.fixture
def hub(tmp_path: Path, notes: Path) -> Iterator[RunningHub]:
    with running_hub(tmp_path / "hub", pipeline_dirs={"notes": notes}) as hub:
        yield hub
        hub.fsck()


def refs(hub: RunningHub) -> tuple[str | None, dict[str, str]]:
    """The commit of `main`, and of each tag."""
    found = hub.api.list_repo_refs(REPO)
    heads = {each.name: each.target_commit for each in found.branches}
    return heads.get("main"), {each.name: each.target_commit for each in found.tags}


def stored(hub: RunningHub, release: Release) -> list[Path]:
    """Where the hub has the shards of the release."""
    files = LargeFiles(hub.folder(REPO, "model"))
    shards = sorted({each.file for each in release.tensors.values()})
    return [files.path(release.files[shard].sha256) for shard in shards]


def test_clients_read_any_release_and_main_is_the_served_one(
    hub: RunningHub, notes: Path, tmp_path: Path
) -> None:
    first, second = network_release(notes, seed=1), network_release(notes, seed=2)
    main, tags = refs(hub)
    assert tags.keys() == {first.id, second.id}
    assert main not in tags.values()
    set_current(notes, first.id)
    assert refs(hub) == (tags[first.id], tags)

    for revision, id in (("main", first.id), (first.id, first.id), (second.id, second.id)):
        folder = Path(hub.api.snapshot_download(REPO, revision=revision, cache_dir=tmp_path))
        names = {path.name for path in (notes / id).iterdir()}
        assert {path.name for path in folder.iterdir()} == {*names, ".gitattributes"}
        assert verify_release(folder) == () and load_release(folder).id == id
    [shard] = (notes / second.id).glob("*.safetensors")
    assert [path.stat().st_ino for path in stored(hub, second)] == [shard.stat().st_ino]


READ = """
import sys
from transformers import AutoModelForCausalLM
for revision in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], revision=revision)
    model.save_pretrained(revision)
"""


@pytest.mark.slow
def test_programs_read_the_weights_of_any_release(
    hub: RunningHub, notes: Path, tmp_path: Path
) -> None:
    first, second = (network_release(notes, seed).id for seed in (1, 2))
    set_current(notes, first)
    env = hub.git_env | {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": hub.token,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    }

    def call(*command: str) -> str:
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    call(sys.executable, "-c", READ, REPO, second, "main", first)
    for revision, id in ((second, second), ("main", first), (first, first)):
        [shard] = (notes / id).glob("*.safetensors")
        made, read = load_file(shard), load_file(tmp_path / revision / "model.safetensors")
        assert made.keys() == read.keys()
        assert all(made[name].equal(read[name]) for name in made)
    hf = str(Path(sys.executable).with_name("hf"))
    for id in (first, second):
        said = call(hf, "download", REPO, "--revision", id, "--quiet")
        assert load_release(Path(said)).id == id and verify_release(Path(said)) == ()


def test_followers_are_told_once_and_no_dataset_has_changed(
    hub: RunningHub, notes: Path, receiver: Receiver
) -> None:
    for type, name in (("dataset", REPO), ("model", REPO)):
        url = f"{receiver.url}/{type}"
        hub.api.create_webhook(url=url, watched=[{"type": type, "name": name}], secret="s" * 20)
    release = echo_release(notes, 1)
    refs(hub)
    set_current(notes, release.id)
    refs(hub), refs(hub)
    told = receiver.wait_for(3)
    assert [each.json["event"]["action"] for each in told] == ["create", "update", "update"]
    moved = [[ref["ref"] for ref in each.json["updatedRefs"]] for each in told[1:]]
    assert moved == [[f"refs/tags/{release.id}"], ["refs/heads/main"]]
    assert {each.path for each in told} == {"/webhooks/record/model"}


def test_a_pruned_release_leaves_nothing_and_gc_keeps_the_others(
    hub: RunningHub, notes: Path
) -> None:
    old, *kept = [echo_release(notes, seed) for seed in range(3)]
    for release in (old, *kept):
        for path in (notes / release.id).iterdir():
            os.utime(path, (0, 0))  # longer ago than the grace of the garbage collection
    set_current(notes, kept[0].id)
    _, before = refs(hub)
    [shard] = stored(hub, old)
    assert shard.exists()
    assert prune(notes, keep=1) == [old.id]
    assert hub.request("POST", "/api/settings/gc").status_code == 200
    assert not shard.exists()
    main, after = refs(hub)
    assert after == {each.id: before[each.id] for each in kept}
    assert main == before[kept[0].id]
    with pytest.raises(RevisionNotFoundError):
        hub.api.model_info(REPO, revision=before[old.id])
    for release in kept:
        assert all(path.stat().st_nlink == 2 for path in stored(hub, release))


def test_what_cannot_be_shown_is_logged_once_and_hides_nothing_else(
    hub: RunningHub, notes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged, whole = echo_release(notes, 1), echo_release(notes, 2)
    (notes / damaged.id / "tokenizer.json").write_text("{}")
    for _ in range(3):
        assert refs(hub)[1].keys() == {whole.id}
    assert caplog.text.count("tokenizer.json: truncated") == 1


def test_the_refs_follow_the_disk_and_not_a_person(hub: RunningHub, notes: Path) -> None:
    release = echo_release(notes, 1)
    set_current(notes, release.id)
    refs(hub)
    hub.api.upload_file(path_or_fileobj=b"{}", path_in_repo="config.json", repo_id=REPO)
    hub.api.delete_tag(REPO, tag=release.id)
    main, tags = refs(hub)
    assert tags == {release.id: main}
    set_back(notes, Served())
    assert refs(hub)[0] not in (None, main)


def test_the_model_of_a_person_is_not_taken(
    hub: RunningHub, notes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.api.create_repo(REPO)
    hub.api.upload_file(path_or_fileobj=b"{}", path_in_repo="config.json", repo_id=REPO)
    before = refs(hub)
    set_current(notes, echo_release(notes, 1).id)
    assert refs(hub) == refs(hub) == before
    assert caplog.text.count("has files of somebody") == 1


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """The folder of a release on the machine of an agent, where it is the first one."""
    folder = tmp_path / "elsewhere" / "notes"
    return folder / echo_release(folder, 7, max_shard_bytes=100).id


def uploaded(hub: RunningHub, folder: Path, branch: str) -> None:
    hub.api.create_repo(REPO, exist_ok=True)
    hub.api.create_branch(REPO, branch=branch)
    hub.api.upload_folder(repo_id=REPO, folder_path=folder, revision=branch)


@pytest.fixture
def releases(hub: RunningHub, notes: Path) -> Iterator[Releases]:
    database = open_database(hub.root)
    yield Releases(
        repositories=Repositories(hub.root, database),
        log=EventLog(database=database, hub_url=hub.url),
        owner="local",
        pipeline_dirs={"notes": notes},
        running_job=lambda *_: None,
    )
    database.close()


def test_an_uploaded_attempt_becomes_a_release(
    hub: RunningHub, notes: Path, releases: Releases, elsewhere: Path
) -> None:
    set_current(notes, echo_release(notes, 1).id)
    uploaded(hub, elsewhere, "attempts/j1-1")
    taken = take_release(releases, pipeline="notes", revision="attempts/j1-1")
    # It has the next number here: its own is taken.
    made, sent = load_release(taken), load_release(elsewhere)
    assert (taken.parent, taken.name) == (notes, f"r000002-{sent.id[-8:]}")
    assert made == sent.model_copy(update={"id": taken.name})
    assert verify_release(taken) == ()
    shards = stored(hub, made)
    assert len(shards) == 3
    assert all(path.stat().st_nlink == 2 for path in shards)
    assert take_release(releases, pipeline="notes", revision="attempts/j1-1") == taken
    assert taken.name in refs(hub)[1]
    # The attempt does not run any more, so its upload goes.
    assert hub.request("POST", "/api/settings/gc").status_code == 200
    assert [each.name for each in hub.api.list_repo_refs(REPO).branches] == ["main"]
    assert all(path.stat().st_nlink == 2 for path in shards)


def test_what_is_no_whole_release_is_refused_with_all_reasons(
    hub: RunningHub, notes: Path, releases: Releases, elsewhere: Path
) -> None:
    shards = sorted(elsewhere.glob("*.safetensors"))
    shards[0].unlink()
    shards[1].write_bytes(shards[1].read_bytes()[:-1])
    uploaded(hub, elsewhere, "attempts/j1-1")
    with pytest.raises(ReleaseError) as refused:
        take_release(releases, pipeline="notes", revision="attempts/j1-1")
    assert len(refused.value.reasons) == 2
    assert f"{shards[0].name}: missing" in refused.value.reasons
    (elsewhere / RELEASE_FILE).unlink()
    uploaded(hub, elsewhere, "attempts/j1-2")
    with pytest.raises(ReleaseError, match=r"release.json: missing"):
        take_release(releases, pipeline="notes", revision="attempts/j1-2")
    assert [path for path in notes.iterdir() if path.name[0] != "."] == []


def test_a_file_of_another_file_system_is_copied(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        if os.stat(other).st_dev == tmp_path.stat().st_dev:
            pytest.skip("/dev/shm is on the file system of the temporary files")
        release = echo_release(Path(other) / "notes", 1)
        with running_hub(tmp_path / "hub", pipeline_dirs={"notes": Path(other) / "notes"}) as hub:
            assert refs(hub)[1].keys() == {release.id}
            assert [path.stat().st_nlink for path in stored(hub, release)] == [1]
            hub.fsck()


def test_the_served_release_is_pushed_to_another_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path / "home")
    notes = home.releases_dir / "notes"
    releases = [
        echo_release(notes, seed, max_shard_bytes=size) for seed, size in ((1, 100), (2, 10**9))
    ]
    with running_hub(tmp_path / "elsewhere") as hub:
        pipeline = PipelineSettings(
            name="notes", dataset="me/facts", push_to="me/notes", push_endpoint=hub.url
        )
        settings = Settings.model_construct(pipelines=(pipeline,))

        def stack() -> None:
            """A whole life of a stack."""
            with pushing(settings, home):
                pass

        def main() -> str:
            cache = tmp_path / "cache"
            downloaded = Path(hub.api.snapshot_download("me/notes", cache_dir=cache))
            assert verify_release(downloaded) == ()
            return load_release(downloaded).id

        def said() -> list[str]:
            return [each.message for each in faults(Facts(home, settings), [check_push_to])]

        stack()
        assert said() == [], "nothing is served yet"
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        for release in releases:
            set_current(notes, release.id)
            stack()
            assert len(said()) == 1
            assert f"{release.id} was not pushed to me/notes on {hub.url}" in said()[0]
            monkeypatch.setenv("HF_TOKEN", hub.token)
            stack()
            assert len(said()) == 1, "the time for another try has not come"
            monkeypatch.setattr("pipeline.stack.push_to.RETRY_SECONDS", 0.0)
            stack()
            assert said() == []
            assert main() == release.id
            monkeypatch.undo()
            monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        stack()
        assert said() == [], "it is pushed once"
        assert {each.name for each in hub.api.list_repo_refs("me/notes").tags} == {
            each.id for each in releases
        }
