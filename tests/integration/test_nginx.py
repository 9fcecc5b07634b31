"""Two followers behind nginx, with the configuration of docs/cluster.md."""

import re
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from serving.follow import Follower
from tests.hub_fixtures import running_hub
from tests.integration.test_follow import REPO, push, source
from tests.jobs_fixtures import until
from tests.ports import free_port
from tests.serving_fixtures import echo_app, echo_release, running

DOC = Path(__file__).parents[2] / "docs/cluster.md"


@contextmanager
def nginx(folder: Path, servers: Sequence[str]) -> Iterator[str]:
    """nginx with the configuration of the doc, but with these servers and a free port; its URL."""
    found = re.search(r"```nginx\n(.*?)```", DOC.read_text(), re.DOTALL)
    assert found is not None
    port, text = free_port(), found[1]
    places = {"listen 80;": f"listen 127.0.0.1:{port};"}
    places |= {f"follower{n}:8000": url.removeprefix("http://") for n, url in enumerate(servers, 1)}
    for told, here in places.items():
        assert text.count(told) == 1, told
        text = text.replace(told, here)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    own = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    (folder / "conf").write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log {folder}/log;\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{own}{text}}}\n"
    )
    process = subprocess.Popen(["nginx", "-p", folder, "-c", "conf", "-e", folder / "log"])
    try:
        until(lambda: (folder / "pid").exists() or process.poll() is not None)
        assert process.poll() is None, (folder / "log").read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_clients_see_neither_a_swap_nor_a_stop_of_a_follower(tmp_path: Path) -> None:
    first, second = (echo_release(tmp_path / "made", seed).id for seed in (1, 2))
    answered: Counter[tuple[int, str]] = Counter()
    done = threading.Event()

    def ask(url: str) -> None:
        body = {"prompt": "Hello", "max_tokens": 4}
        with httpx.Client(timeout=60) as client:
            while not done.is_set():
                answer = client.post(f"{url}/v1/completions", json=body)
                told = answer.json()["system_fingerprint"] if answer.is_success else answer.text
                answered[answer.status_code, told] += 1

    with ExitStack() as stack:
        hub = stack.enter_context(running_hub(tmp_path / "hub"))
        hub.api.create_repo(REPO)
        push(hub, tmp_path / "made" / first)
        urls, stops = [], []
        for name in ("a", "b"):
            follower = Follower(source=source(hub), seconds=0.2, secret="s", name=name, url=name)
            stops.append(stack.enter_context(ExitStack()))
            app = echo_app(tmp_path / name, follower=follower)
            urls.append(stops[-1].enter_context(running(app, loop="asyncio")))

        def serve(release: str) -> bool:
            told = [httpx.get(f"{url}/health").json() for url in urls]
            return all(each.get("release") == release for each in told)

        until(lambda: serve(first))
        url = stack.enter_context(nginx(tmp_path, urls))
        asking = [threading.Thread(target=ask, args=[url]) for _ in range(4)]
        for each in asking:
            each.start()
            stack.callback(each.join)
        stack.callback(done.set)
        until(lambda: answered[200, first] > 20)
        push(hub, tmp_path / "made" / second)
        until(lambda: serve(second))
        before = answered[200, second]
        stops[0].close()
        until(lambda: answered[200, second] > before + 50)
    assert {status for status, _ in answered} == {200}, answered
