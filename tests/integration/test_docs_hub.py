"""The Python of docs/hub.md as it stands there, and what the page says of uploads."""

import re
import subprocess
import sys
from pathlib import Path

from tests.hub_fixtures import RunningHub, push_file
from tests.receiver_scripts import ROOT

pytest_plugins = ["tests.hub_plugin"]

READ, SEND = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "docs" / "hub.md").read_text(), re.M | re.S
)


MORE = '{"text": "another row"}\n'


def run(hub: RunningHub, folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    env = hub.git_env | {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": hub.token,
        "HF_HOME": str(folder),
        "HF_HUB_DISABLE_XET": "1",
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_client_reads_what_was_pushed_and_sends_more(hub: RunningHub, tmp_path: Path) -> None:
    worktree = tmp_path / "notes"
    hub.git("clone", "--quiet", hub.create_dataset("local/notes"), str(worktree), cwd=tmp_path)
    head = push_file(hub, worktree, "rows.jsonl", '{"text": "a row"}\n')

    done = run(hub, tmp_path, READ + "print(open(f'{folder}/rows.jsonl').read())")
    assert done.stdout.splitlines()[:2] == [head, '{"text": "a row"}'], done.stderr
    (worktree / "more.jsonl").write_text(MORE)
    done = run(hub, worktree, SEND)
    assert done.returncode == 0, done.stderr
    assert hub.request("GET", "/datasets/local/notes/resolve/main/more.jsonl").text == MORE
