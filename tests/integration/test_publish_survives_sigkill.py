"""A publisher killed at any moment leaves no half release, and its number is not given again."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from serving.weights.release_removal import sweep
from serving.weights.release_store import list_releases, release_number
from serving.weights.verify import verify_release
from tests.serving_fixtures import tiny_llama

KILLS = int(os.environ.get("SERVING_KILLS", "12"))

PUBLISH_FOREVER = """
import sys
from pathlib import Path
import serving.weights.shards  # which takes seconds
from serving.weights.publish import publish_folder
pipeline_dir, source = map(Path, sys.argv[1:])
print("ready", flush=True)
while True:
    print(publish_folder(pipeline_dir, source).id, flush=True)
"""


def test_a_killed_publisher_leaves_nothing_half(tmp_path: Path) -> None:
    kill_publishers(tmp_path, 4)


@pytest.mark.slow
def test_many_killed_publishers_leave_nothing_half(tmp_path: Path) -> None:
    kill_publishers(tmp_path, KILLS)


def kill_publishers(tmp_path: Path, num_kills: int) -> None:
    source = tmp_path / "checkpoint"
    tiny_llama().save_pretrained(source, max_shard_size="4KB")
    pipeline_dir = tmp_path / "releases" / "answers"
    chance = random.Random(0)
    announced: list[str] = []
    for kill in range(num_kills):
        process = subprocess.Popen(
            [sys.executable, "-c", PUBLISH_FOREVER, str(pipeline_dir), str(source)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        if kill % 2:  # every other one dies at a later release than its first
            announced.append(process.stdout.readline().strip())
        time.sleep(chance.uniform(0, 0.1))  # the moment of the kill is what varies here
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate()
        announced += [line for line in rest.splitlines() if len(line) == len("r000001-12345678")]
        releases = list_releases(pipeline_dir)
        assert {release.id for release in releases} >= set(announced)
        for release in releases:
            assert verify_release(pipeline_dir / release.id) == ()
        sweep(pipeline_dir)
        left = {path.name for path in pipeline_dir.iterdir() if path.name.startswith(".unfinished")}
        assert left == set()
    numbers = [release_number(release.id) for release in list_releases(pipeline_dir)]
    assert len(announced) >= num_kills // 2 and len(numbers) == len(set(numbers))
