"""`Launcher`: starts agents on an engine, such as Slurm or Kubernetes, with the engine's own
command line.

Each engine takes a name for what it runs. A launcher gives it the name of the attempt, and asks for
this name later, so it needs to remember nothing. If a runner dies while it submits, the next runner
asks for the name when the lease has run out, and so finds what was started.

A launcher is a table in the settings: a command to submit, one that asks, one that cancels, and the
words in which the engine answers. `launchers.toml` has those of well-known engines.

The ticket of an attempt must not be in a command or in a script, because all users of a machine see
commands. It is in the environment of the command that submits or, for an engine that does not pass
this environment on, in a file that only this user can read, while the command runs.
"""

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import IO, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from jobs.errors import LaunchError
from jobs.folder import write_by_rename
from jobs.spec import Resources

Preset = Literal["container", "docker", "huggingface", "kubernetes", "podman", "ray", "slurm"]
EngineState = Literal[
    "image_not_found", "out_of_memory", "preempted", "ended", "running", "queued", "unknown"
]
"""In the order in which an answer of an engine is searched: an answer may have several words, such
as `Failed` of a pod and `OOMKilled` of its container."""

PRESETS: dict[str, dict[str, Any]] = tomllib.loads(
    (Path(__file__).parent / "launchers.toml").read_text(encoding="utf-8")
)
PRESETS["container"] = PRESETS["podman" if shutil.which("podman") else "docker"]

LIMIT_SECONDS = 30.0
"""A command of an engine that takes longer is killed."""
_TOLD_CHARACTERS = 500
_COLOURS = re.compile(r"\x1b\[[\d;]*m")
_KEPT_SECONDS = 3600
"""How long Kubernetes keeps a job that has ended."""
_SOURCES = {"minutes": "timeout_seconds", "seconds": "timeout_seconds", "memory_bytes": "memory"}
"""A value in a command → the key of `Resources` that it is made from."""
_IN_MANIFEST = {"image", "cpus", "memory", "gpus", "timeout_seconds"}


class LauncherSettings(BaseModel):
    """How to start jobs on one engine.

    In the words of a command, `$value` is replaced (write `$$` for a dollar sign). All commands
    have `$name`, and `$options` for the words of `options`. `submit` also has:

    - the keys of `[pipelines.resources]` (but not `$timeout_seconds`), `$seconds` and `$minutes`
      (of `timeout_seconds`), and `$memory_bytes`. If a value is not set, a word such as
      `--gpus=$gpus` is left out. A word that is only a value, such as `$image`, needs the value.
    - `$agent` for the words of `agent`; `$script`, the path of a shell script that runs them.
    - `$manifest`, the path of a manifest of a Kubernetes Job; `$runtime_env`, the path of a runtime
      environment of Ray. Both have the ticket. Like the script, they exist while `submit` runs.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    preset: Preset | None = None
    """The engine whose commands and words are used for the keys that are not set. If unset, and the
    launcher has the name of a preset, it is this preset."""
    submit: tuple[str, ...] = Field(min_length=1)
    """The command that starts the agent on the engine under the name `$name`, without waiting for
    its end. It gets `JOB_URL` and `JOB_TICKET` in its environment, and must pass them on. It may
    take 30 seconds, like the other commands."""
    status: tuple[str, ...] = Field(min_length=1)
    """The command that prints how far the job `$name` is. If the engine knows no such job, it
    prints nothing, or a text of `unknown` in `states`."""
    cancel: tuple[str, ...] = Field(min_length=1)
    """The command that ends the job `$name`, and may remove what is left of it."""
    states: dict[EngineState, str | tuple[str, ...]]
    """A state → the words that `status` prints for it. `unknown` has those that say that the engine
    knows no such job."""
    options: tuple[str, ...] = ()
    """More words for the commands, at `$options`: for example `["--account=me"]` with Slurm."""
    agent: tuple[str, ...] = Field(default=("python3", "-m", "jobs.agent"), min_length=1)
    """The command to run on the engine. Its Python needs hotpush."""
    hub_url: str | None = Field(default=None, pattern=r"^https?://\S+$")
    """The hub's URL, as the machines of the engine reach it. If unset, it is the URL of the stack's
    own hub, which normally only this machine reaches."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("preset") in get_args(Preset):
            return {**PRESETS[given["preset"]], **given}
        return given

    @field_validator("submit", "status", "cancel")
    @classmethod
    def _values_are_known(cls, words: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        known = {"name", "options"}
        if info.field_name == "submit":
            known |= {"agent", "script", "manifest", "runtime_env", *_SOURCES}
            known |= set(Resources.model_fields) - {"timeout_seconds"}
        for word in map(Template, words):
            if not word.is_valid() or not set(word.get_identifiers()) <= known:
                raise ValueError(
                    f"{word.template!r} has another value than ${', $'.join(sorted(known))}; write "
                    "$$ for a dollar sign"
                )
        return words

    def misfit(self, resources: Resources) -> str | None:
        """Why this launcher cannot start a job with these resources. None if it can."""
        given = {key for key, value in resources if value is not None}
        names = {name for word in self.submit for name in Template(word).get_identifiers()}
        passed_on = {_SOURCES.get(name, name) for name in names}
        needed = {name for name in Resources.model_fields if f"${name}" in self.submit}
        if "manifest" in names:
            passed_on |= _IN_MANIFEST
            needed.add("image")
        if "runtime_env" in names:
            passed_on.add("nodes")  # a training asks Ray for its other nodes itself
        if missing := sorted(needed - given):
            return (
                f"it needs {', '.join(missing)}; set it under [pipelines.resources], or use --gpus "
                "or --image"
            )
        if ignored := sorted(given - passed_on):
            return (
                f"its command `submit` passes no {', '.join(ignored)} on; remove it from "
                "[pipelines.resources], and use `options` or your own `submit`"
            )
        return None


@dataclass(frozen=True)
class EngineStatus:
    state: EngineState
    """`unknown` also if the engine cannot be asked."""
    told: str
    """What the engine printed, in one line, for a person. Of a long text, the end."""


class Launcher:
    def __init__(self, settings: LauncherSettings) -> None:
        self.settings = settings

    def submit(self, name: str, environment: Mapping[str, str], resources: Resources) -> None:
        """Start the agent under this name with these variables, unless the engine knows the name
        already. Raises LaunchError if the engine refuses, or cannot say whether it knows the name,
        because the agent might then be started twice."""
        settings = self.settings
        if fault := settings.misfit(resources):
            raise LaunchError(f"{name} cannot be launched with `{settings.submit[0]}`: {fault}.")
        if self.status(name).state != "unknown":
            return
        files = {
            "script": f"#!/bin/sh\nexec {shlex.join(settings.agent)}\n",
            "manifest": json.dumps(_manifest(name, settings.agent, environment, resources)),
            "runtime_env": json.dumps({"env_vars": dict(environment)}),
        }
        with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
            values = {**_values(resources), "agent": settings.agent}
            for key, text in files.items():
                values[key] = f"{folder}/{key}"
                write_by_rename(Path(folder, key), text, mode=0o700 if key == "script" else 0o600)
            is_well, told = self._run(settings.submit, name, values, environment)
        # The command may fail after the engine has taken the job, for example by its time limit.
        if not is_well and self.status(name).state not in ("queued", "running"):
            raise _launch_error(f"submit {name}", settings.submit, told)

    def status(self, name: str) -> EngineStatus:
        """Raises LaunchError if the engine cannot say."""
        is_well, told = self._run(self.settings.status, name)
        found = self._find(is_well, told)
        if found is None and (told or not is_well):
            raise _launch_error(f"ask for {name}", self.settings.status, told)
        return EngineStatus(found or "unknown", told[-_TOLD_CHARACTERS:])

    def cancel(self, name: str) -> None:
        """End the job of this name, if there is one. Raises LaunchError if the engine fails."""
        is_well, told = self._run(self.settings.cancel, name)
        if not is_well and self._find(is_well, told) is None:
            raise _launch_error(f"cancel {name}", self.settings.cancel, told)

    def _find(self, is_well: bool, told: str) -> EngineState | None:
        """The state of which the answer has a word. A command that fails can only say that there
        is no such job: its other words are about the failure."""
        states: tuple[EngineState, ...] = get_args(EngineState) if is_well else ("unknown",)
        for state in states:
            words = self.settings.states.get(state, ())
            for word in (words,) if isinstance(words, str) else words:
                if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", told):
                    return state
        return None

    def _run(
        self,
        command: tuple[str, ...],
        name: str,
        values: Mapping[str, str | tuple[str, ...] | None] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> tuple[bool, str]:
        """Run a command. Returns whether it succeeded, and what it printed."""
        known = {"name": name, "options": self.settings.options, **(values or {})}
        words = [filled for word in command for filled in _fill(word, known)]
        try:
            # Files and not pipes: what a command leaves running may hold a pipe open for ever.
            with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
                code = subprocess.run(
                    words,
                    env={**os.environ, **(environment or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    timeout=LIMIT_SECONDS,
                    check=False,
                ).returncode
                told = [_one_line(output), _one_line(errors)]
        except subprocess.TimeoutExpired:
            return False, f"it took longer than {LIMIT_SECONDS:g} seconds"
        except OSError as error:
            return False, f"{words[0]}: {error.strerror}"
        if code == 0:
            return True, told[0]
        return False, f"{told[1] or told[0]} (exit code {code})"


def _one_line(file: IO[bytes]) -> str:
    file.seek(0)
    return " ".join(_COLOURS.sub("", file.read().decode(errors="replace")).split())


def _fill(word: str, values: Mapping[str, str | tuple[str, ...] | None]) -> tuple[str, ...]:
    """The words that replace a word of a command. No word if one of its values is not set."""
    value = values.get(word[1:]) if word.startswith("$") else None
    if isinstance(value, tuple):
        return value
    template = Template(word)
    if any(values[name] is None for name in template.get_identifiers()):
        return ()
    return (template.substitute(values),)


def _values(resources: Resources) -> dict[str, str | tuple[str, ...] | None]:
    seconds = resources.timeout_seconds
    values = {
        **dict(resources),
        "seconds": None if seconds is None else math.ceil(seconds),
        "minutes": None if seconds is None else math.ceil(seconds / 60),
        "memory_bytes": resources.memory_bytes,
    }
    return {key: None if value is None else str(value) for key, value in values.items()}


def _manifest(
    name: str, agent: tuple[str, ...], environment: Mapping[str, str], resources: Resources
) -> dict[str, Any]:
    labels = {"hotpush-job": name}
    limits = {
        "cpu": resources.cpus,
        # Kubernetes means powers of 1000 by `G`.
        "memory": None if resources.memory is None else f"{resources.memory}i",
        "nvidia.com/gpu": resources.gpus,
    }
    container = {
        "name": "job",
        "image": resources.image,
        "command": list(agent),
        "env": [{"name": key, "value": value} for key, value in environment.items()],
        # A container without `requests` requests its limits.
        "resources": {"limits": {key: str(n) for key, n in limits.items() if n is not None}},
    }
    spec: dict[str, Any] = {
        "backoffLimit": 0,
        "ttlSecondsAfterFinished": _KEPT_SECONDS,
        "template": {
            "metadata": {"labels": labels},
            "spec": {"restartPolicy": "Never", "containers": [container]},
        },
    }
    if resources.timeout_seconds is not None:
        spec["activeDeadlineSeconds"] = math.ceil(resources.timeout_seconds)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": spec,
    }


def _launch_error(what: str, command: tuple[str, ...], told: str) -> LaunchError:
    return LaunchError(f"Could not {what} with `{shlex.join(command)}`: {told[-_TOLD_CHARACTERS:]}")
