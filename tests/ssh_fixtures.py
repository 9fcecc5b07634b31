"""A real sshd on loopback, and an `ssh` on PATH that has a key for it."""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hub_fixtures import wait_until
from tests.ports import free_ports

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/opt/homebrew/sbin")


@dataclass(kw_only=True)
class Sshd:
    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """As `--tunnel` takes it."""
        return f"ssh://{getpass.getuser()}@127.0.0.1:{self.port}"

    def start(self) -> None:
        assert SSHD is not None
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # where it puts its unprivileged part
        self.process = subprocess.Popen(
            [SSHD, "-D", "-f", str(self.folder / "sshd_config"), "-E", self.folder / "log"],
            start_new_session=True,
        )
        wait_until(self._answers)

    def kill(self) -> None:
        """With all its connections."""
        assert self.process is not None
        subprocess.run(["kill", "-9", *self._descendants(self.process.pid)], check=True)
        self.process.wait()
        self.process = None

    def _descendants(self, pid: int) -> list[str]:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [str(pid), *(found for child in children for found in self._descendants(int(child)))]

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False


@pytest.fixture
def sshd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sshd]:
    client = shutil.which("ssh")
    if client is None or SSHD is None:
        pytest.skip("there is no OpenSSH server and client on this machine")
    folder = tmp_path / "ssh"
    folder.mkdir()
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True
        )
    [port] = free_ports(1)
    (folder / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {folder}/host\nPidFile none\n"
        f"AuthorizedKeysFile {folder}/user.pub\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nAllowTcpForwarding remote\n"
    )
    (folder / "ssh_config").write_text(
        f"IdentityFile {folder}/user\nIdentitiesOnly yes\n"
        f"UserKnownHostsFile {folder}/known_hosts\nStrictHostKeyChecking accept-new\n"
    )
    (folder / "bin").mkdir()
    (folder / "bin" / "ssh").write_text(f'#!/bin/sh\nexec {client} -F "{folder}/ssh_config" "$@"\n')
    (folder / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    server = Sshd(folder=folder, port=port)
    server.start()
    yield server
    if server.process is not None:
        server.kill()
