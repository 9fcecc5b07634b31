"""A publisher killed at any moment leaves no half release, and its number is not given again."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from serving.weights.release_store import list_releases, release_number, sweep
from serving.weights.verify import verify_release
from tests.serving_fixtures import tiny_llama

NUM_KILLS = int(os.environ.get("SERVING_KILLS", "2"))

PUBLISH_FOREVER = """
import os, sys
from pathlib import Path
import serving.weights.shards  # which takes seconds, so each publisher is a fork
from serving.weights.publish import publish_folder
pipeline_dir, source = map(Path, sys.argv[1:])
for _ in sys.stdin:
    if not os.fork():
        break
    os.wait()
    print("gone", flush=True)
else:
    sys.exit()
print(os.getpid(), flush=True)
while True:
    print(publish_folder(pipeline_dir, source).id, flush=True)
"""


def test_a_killed_publisher_leaves_nothing_half(tmp_path: Path) -> None:
    source = tmp_path / "checkpoint"
    tiny_llama().save_pretrained(source, max_shard_size="4KB")
    pipeline_dir = tmp_path / "releases" / "answers"
    chance = random.Random(0)
    announced: list[str] = []
    faults: list[str] = []
    command = [sys.executable, "-c", PUBLISH_FOREVER, str(pipeline_dir), str(source)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as publishers:
        asks, tells = publishers.stdin, publishers.stdout
        assert asks is not None and tells is not None
        for kill in range(NUM_KILLS):
            print(file=asks, flush=True)
            pid = int(tells.readline())
            if kill % 2:  # every other one dies at a later release than its first
                announced.append(tells.readline().strip())
            time.sleep(chance.uniform(0, 0.1))  # the moment of the kill is what varies here
            os.kill(pid, signal.SIGKILL)
            announced += iter(lambda: tells.readline().strip(), "gone")
            ids = [release.id for release in list_releases(pipeline_dir)]
            faults += [f"{each}: announced, but not there" for each in announced if each not in ids]
            for each in ids:
                faults += [f"{each}: {fault}" for fault in verify_release(pipeline_dir / each)]
            sweep(pipeline_dir)
            faults += [f"{path.name}: not swept" for path in pipeline_dir.glob(".unfinished*")]
    assert len(announced) >= NUM_KILLS // 2
    numbers = Counter(release_number(each) for each in ids)
    faults += [f"number {each}: given again" for each in numbers if numbers[each] > 1]
    assert faults == []
