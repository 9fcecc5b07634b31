"""Reads the settings from `pipeline.toml` and from environment variables, which override the file.

`PIPELINE_HUB__PORT=9000` in the environment means `port = 9000` under `[hub]`. Each package defines
its own table of settings. This module combines these tables, and defines the tables `[stack]` and
`[[pipelines]]`.
"""

import difflib
import os
import shlex
import tomllib
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from jobs.folder import write_by_rename
from jobs.launcher import PRESETS as LAUNCHER_PRESETS
from jobs.launcher import LauncherSettings
from jobs.settings import JobsSettings
from jobs.spec import LOCAL, Resources, is_git_url
from pipeline.errors import PipelineError
from pipeline.hub.settings import HubSettings, http_url
from pipeline.logs import LogSettings
from pipeline.paths import Home, settings_file
from pipeline.retrain.base_model import HUB_ID, PRESETS
from pipeline.retrain.settings import (
    HUGGING_FACE,
    DataSettings,
    GateSettings,
    HubEndpoint,
    ParaphraseSettings,
    TrainSettings,
)
from receiver.settings import ReceiverSettings
from serving.settings import ServingSettings

Table = TypeVar("Table", bound=BaseModel)

HANG_SECONDS = 60.0
SECRET_KEYS = ("api_key", "database", "database_url")
"""Keys whose value is not shown. A database URL may contain a password."""
SETTINGS_COPY = "PIPELINE_SETTINGS_COPY"
"""The services of a stack get the path of the copy (`write_settings_copy`) in this environment
variable."""


class PipelineSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    """The pipeline's name. In a request to the pipeline's completion server, the field `model` must
    be this name or the id of the served release, or must be left out."""
    dataset: str = Field(
        pattern=r"^([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*|\w+://[^\s-]\S*|[\w.][\w.-]*@[\w.-]+:\S+)$"
    )
    """The dataset to follow: `owner/name` on a hub, or the git URL of a repository elsewhere. For a
    git URL, create a webhook on the repository's server yourself. The webhook must post pushes to
    the receiver's route `/webhooks/retrain/github`, `/webhooks/retrain/gitea` or
    `/webhooks/retrain/gitlab`."""
    dataset_endpoint: HubEndpoint = "hub"
    """The hub that has the dataset `owner/name`: `hub` for the stack's own hub, or the URL of
    another hub, such as `https://huggingface.co`. `pipeline up` creates a webhook on the other hub,
    with your own token. The description of `base_model_endpoint` says where this token comes
    from."""
    ref: str = "main"
    """The branch to follow. Pushes to other refs are ignored."""
    base_model: str = "preset:tiny"
    """The model that training starts from: `preset:tiny`, a checkpoint folder, or the id of a model
    on a hub (`owner/name` or `owner/name@revision`). A relative path of a checkpoint folder starts
    at the folder of the settings file."""
    base_model_endpoint: HubEndpoint = HUGGING_FACE
    """If `base_model` is the id of a model on a hub: the URL of this hub, or `hub` for the stack's
    own hub. If this is another hub, it gets your own token: `HF_TOKEN` of the shell that started
    the stack, or the token of `hf auth login`."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """The port of this pipeline's server. By default, the only pipeline has the port that `port`
    under [serving] sets. With several pipelines, the gateway has this port and answers for all of
    them; the server of the first pipeline has the next port, and so on."""
    debounce_seconds: float = Field(default=1.0, ge=0)
    """The job of a push starts when no further commit has arrived for this many seconds."""
    max_wait_seconds: float = Field(default=30.0, ge=0)
    """The job of a push waits for further commits for at most this many seconds after its first
    commit."""
    keep: int = Field(default=5, ge=2)
    """How many releases to keep. A retraining and `pipeline releases promote` remove older ones,
    unless they are served, pending (chosen, but not served yet) or pinned (kept by
    `pipeline releases pin`)."""
    command: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Your own trainer: a program and its arguments. Each job then runs this program instead of the
    built-in retraining. A relative path of the program starts at the folder of the settings file.
    The program runs in the job's folder. When it has trained, it has to call
    `pipeline releases promote FOLDER`, which judges the new weights, makes a release from them, and
    serves it."""
    on_outcome: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """A command with its arguments, which gets the outcome of each job as JSON on standard input. A
    relative path of the program starts at the folder of the settings file. If your own trainer
    (`command`) succeeds without writing an `outcome.json`, there is no outcome to report."""
    launcher: str = LOCAL
    """Where the jobs run: `local` for this machine, or NAME for the engine of [launchers.NAME]."""
    resources: Resources = Resources()
    push_to: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
    """A model repository `owner/name` on another hub. Each release that is served is pushed there,
    with your own token (see `base_model_endpoint`): `main` is the served one, and each has a tag.
    If the repository does not exist, it is created as a private one."""
    push_endpoint: str = Field(default=HUGGING_FACE, pattern=r"^https?://\S+$")
    """The URL of the hub that has `push_to`."""
    data: DataSettings = DataSettings()
    train: TrainSettings = TrainSettings()
    gate: GateSettings = GateSettings()
    paraphrase: ParaphraseSettings | None = None

    @field_validator("base_model")
    @classmethod
    def _preset_is_known(cls, base_model: str) -> str:
        if base_model.startswith("preset:") and base_model not in PRESETS:
            raise ValueError(f"there is no such preset, only {', '.join(PRESETS)}")
        return base_model

    @field_validator("dataset_endpoint")
    @classmethod
    def _git_url_has_no_endpoint(cls, endpoint: str, info: ValidationInfo) -> str:
        dataset = info.data.get("dataset", "")
        if endpoint != "hub" and is_git_url(dataset):
            raise ValueError(
                f"it is only for a dataset OWNER/NAME, but {dataset} is a git URL; leave it out"
            )
        return endpoint

    @model_validator(mode="after")
    def _machines_share_a_place(self) -> "PipelineSettings":
        is_alone = self.command is not None or (self.resources.nodes or 1) == 1
        if not is_alone and self.train.checkpoint_url is None:
            raise ValueError(
                "`resources.nodes` needs `train.checkpoint_url`: a place for checkpoints that all "
                "these machines reach"
            )
        return self

    def base_folder(self) -> Path | None:
        """The folder that `base_model` names. None for a preset or the id of a model on a hub. If
        there is a folder whose relative path looks like such an id, the folder is used."""
        if self.base_model in PRESETS:
            return None
        folder = absolute_path(Path(self.base_model), settings_file().parent)
        is_id = HUB_ID.fullmatch(self.base_model) is not None
        return None if is_id and not folder.is_dir() else folder

    def missing_base(self) -> str | None:
        """Why training cannot start from `base_model`; None if it can. Also None if `base_model` is
        the id of a model on a hub, because this method does not ask the hub."""
        folder = self.base_folder()
        if folder is None or (folder / "config.json").is_file():
            return None
        what = "no checkpoint: it has no config.json" if folder.is_dir() else "not there"
        return (
            f"base_model of {self.name}: {folder} is {what}; set base_model in {settings_file()} "
            f"to a checkpoint folder, a hub id (OWNER/NAME) or {', '.join(PRESETS)}"
        )


class StackSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    hang_seconds: float = Field(default=HANG_SECONDS, gt=0)
    """If a service does not answer for this many seconds, `pipeline up` or `pipeline jobs run`,
    whichever started the service, kills it and starts it again."""


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix="PIPELINE_", env_nested_delimiter="__"
    )

    hub: HubSettings = HubSettings()
    receiver: ReceiverSettings = ReceiverSettings()
    jobs: JobsSettings = JobsSettings()
    serving: ServingSettings = ServingSettings()
    logs: LogSettings = LogSettings()
    stack: StackSettings = StackSettings()
    launchers: dict[str, LauncherSettings] = {}
    pipelines: tuple[PipelineSettings, ...] = ()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        copy = Home.find().settings_copy
        # A program that a service starts may inherit the variable. But if the program works with
        # another state folder, the copy is not meant for it.
        is_in_stack = os.environ.get(SETTINGS_COPY) == str(copy) and copy.exists()
        file = copy if is_in_stack else settings_file()
        return (env_settings, TomlConfigSettingsSource(settings_cls, file))

    @field_validator("launchers", mode="before")
    @classmethod
    def _a_name_may_be_a_preset(cls, launchers: Any) -> Any:
        if not isinstance(launchers, dict):
            return launchers
        return {
            name: {"preset": name, **table}
            if name in LAUNCHER_PRESETS and isinstance(table, dict)
            else table
            for name, table in launchers.items()
        }

    @field_validator("*")
    @classmethod
    def _paths_are_absolute(cls, value: Any) -> Any:
        folder = settings_file().parent
        if isinstance(value, BaseModel):
            return with_absolute_paths(value, folder)
        if isinstance(value, dict):
            return {name: with_absolute_paths(table, folder) for name, table in value.items()}
        return tuple(with_absolute_paths(pipeline, folder) for pipeline in value)

    @model_validator(mode="after")
    def _names_differ(self) -> "Settings":
        names = [pipeline.name for pipeline in self.pipelines]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two pipelines are called {', '.join(twice)}; names must differ")
        return self

    @model_validator(mode="after")
    def _launchers_are_known(self) -> "Settings":
        for pipeline in self.pipelines:
            if fault := self.misfit(pipeline.launcher, pipeline.resources):
                raise ValueError(f"pipeline {pipeline.name!r}: {fault}")
        in_image = Resources() if self.hub.jobs_launcher == LOCAL else Resources(image="any")
        if fault := self.misfit(self.hub.jobs_launcher, in_image):
            raise ValueError(f"hub.jobs_launcher: {fault}")
        return self

    def misfit(self, launcher: str, resources: Resources) -> str | None:
        """Why the launcher of this name cannot start a job with these resources. None if it can."""
        fault = None
        if launcher in self.launchers:
            fault = self.launchers[launcher].misfit(resources)
        elif launcher != LOCAL:
            known = ", ".join([LOCAL, *self.launchers])
            fault = f"there is none of this name, only {known}; add a table [launchers.{launcher}]"
        elif resources != Resources():
            fault = "it takes no [pipelines.resources] and no --gpus or --image; remove them"
        return fault and f"launcher {launcher!r}: {fault}"

    def pipeline(self, name: str | None) -> PipelineSettings:
        """The pipeline called `name`. If `name` is None and only one pipeline is configured, this
        is the configured pipeline. Raises PipelineError if there is no pipeline called `name`, if
        no pipeline is configured, or if `name` is None and several pipelines are configured."""
        if not self.pipelines:
            if not settings_file().exists():
                raise no_settings_file()
            raise PipelineError(
                f"no pipeline is configured in {settings_file()}; write one with: "
                "pipeline init --name NAME --dataset OWNER/NAME"
            )
        if name is None and len(self.pipelines) == 1:
            return self.pipelines[0]
        for pipeline in self.pipelines:
            if pipeline.name == name:
                return pipeline
        known = ", ".join(pipeline.name for pipeline in self.pipelines)
        if name is None:
            raise PipelineError(f"several pipelines are configured ({known}); add --pipeline NAME")
        raise PipelineError(f"no pipeline is called {name!r}; configured are: {known}")

    @property
    def datasets_on_hub(self) -> tuple[str, ...]:
        """The datasets on the stack's own hub that pipelines follow. A dataset that several
        pipelines follow is listed once."""
        here = (pipeline.dataset for pipeline in self.pipelines if self.is_on_own_hub(pipeline))
        return tuple(dict.fromkeys(here))

    def is_on_own_hub(self, pipeline: PipelineSettings) -> bool:
        """Whether the pipeline's dataset is on the stack's own hub."""
        return not is_git_url(pipeline.dataset) and self.other_hub(pipeline) is None

    def other_hub(self, pipeline: PipelineSettings) -> str | None:
        """The URL of the hub that has the pipeline's dataset. None if the dataset is on the stack's
        own hub, or if the dataset is a git URL."""
        endpoint = pipeline.dataset_endpoint.rstrip("/")
        return None if endpoint in ("hub", self.hub_url) else endpoint

    def server_port(self, pipeline: PipelineSettings) -> int:
        if pipeline.port is not None:
            return pipeline.port
        names = [other.name for other in self.pipelines]
        first = self.serving.port + (1 if self.gateway_url else 0)
        return first + names.index(pipeline.name)

    @property
    def gateway_url(self) -> str | None:
        """The address that answers for every pipeline. None if there are fewer than two pipelines:
        the server of the only pipeline has this address itself."""
        if len(self.pipelines) < 2:
            return None
        return http_url(self.serving.host, self.serving.port)

    @property
    def hub_url(self) -> str:
        return self.hub.url

    @property
    def receiver_url(self) -> str:
        return http_url(self.receiver.host, self.receiver.port)

    def server_url(self, pipeline: PipelineSettings) -> str:
        return http_url(self.serving.host, self.server_port(pipeline))


def with_absolute_paths(table: Table, folder: Path) -> Table:
    """The table of the settings, and the tables in it, with absolute paths. A relative path starts
    at `folder`. Raises ValueError if the home folder in a path is not known."""
    changed: dict[str, Any] = {}
    for key in table.model_fields_set:
        try:
            changed[key] = _with_absolute_path(key, getattr(table, key), folder)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
    return table.model_copy(update=changed)


def _with_absolute_path(key: str, value: Any, folder: Path) -> Any:
    match key, value:
        case _, BaseModel():
            return with_absolute_paths(value, folder)
        case _, Path():
            return absolute_path(value, folder)
        # If a program has no `/`, the system looks for it on PATH.
        case (
            "command" | "on_outcome" | "submit" | "status" | "cancel",
            (program, *arguments),
        ) if "/" in program:
            return (str(absolute_path(Path(program), folder)), *arguments)
        case "tunnel", str():
            program, *arguments = shlex.split(value) or [""]
            if "/" in program:
                return shlex.join([str(absolute_path(Path(program), folder)), *arguments])
        # Only the disk shows whether `owner/name` is a relative path or an id on a hub. So
        # `PipelineSettings.base_folder` makes relative paths absolute, when they are needed.
        case "base_model", str() if value.startswith("~"):
            return str(absolute_path(Path(value), folder))
        case "database_url", str() if "://" not in value:
            return str(absolute_path(Path(value), folder))
    return value


def absolute_path(path: Path, folder: Path) -> Path:
    try:
        return folder / path.expanduser()
    except RuntimeError:
        raise ValueError(f"the home folder in {path} is not known; write the whole path") from None


def write_settings_copy(home: Home) -> None:
    """Copy the settings file into the state folder. The services of a stack read this copy. So a
    service that is started again gets the settings that the stack was started with, even if the
    settings file has changed. If there is no settings file, the copy is empty."""
    file = settings_file()
    # A process of an earlier stack may read the copy now. Settings may contain passwords.
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    write_by_rename(home.settings_copy, text, mode=0o600)


def no_settings_file() -> PipelineError:
    file = settings_file()
    return PipelineError(
        f"there is no {file.name} in {file.parent} or above it; change to the folder of your "
        "project, or start a new one in this folder: pipeline init --name NAME --dataset OWNER/NAME"
    )


def load_settings() -> Settings:
    """Read the settings. If there is no settings file, each setting comes from an environment
    variable or has its default. By default there is no pipeline.

    Raises PipelineError. The message names each wrong key. For an unknown key, the message suggests
    a known key with a similar name, or lists the known keys.
    """
    file = settings_file()
    try:
        return Settings()
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PipelineError(f"{file} is not TOML: {error}") from None
    except SettingsError as error:
        raise PipelineError(
            f"{error}: in a variable PIPELINE_…, write a list or a table as JSON; to set one key "
            "of a table, write for example PIPELINE_HUB__PORT=9000"
        ) from None
    except ValidationError as error:
        lines: dict[str, list[str]] = {}
        for problem in error.errors():
            location = problem["loc"]
            source = _environment_variable(location) or str(file)
            line = fault_text(location, problem["type"], problem["msg"], problem["input"])
            lines.setdefault(source, []).append(line)
        raise PipelineError(
            "; ".join(f"{source}: {'; '.join(faults)}" for source, faults in lines.items())
        ) from None


def _environment_variable(location: tuple[int | str, ...]) -> str | None:
    """The environment variable that set this key; None if no variable set it."""
    wanted = "PIPELINE_" + "__".join(map(str, location))
    return next((name for name in os.environ if name.upper() == wanted.upper()), None)


def fault_text(location: tuple[int | str, ...], kind: str, message: str, given: Any) -> str:
    """A text that says what is wrong with the key at `location` in the settings, or with the value
    of this key."""
    keys = [key for key in location if isinstance(key, str)]
    numbered = [f"number {key + 1}" for key in location if isinstance(key, int)]
    if not keys:
        return message.removeprefix("Value error, ")
    *tables, key = keys
    table = f"[{'.'.join(tables)}]" if tables else "the top level"
    place = " ".join([table, *numbered])
    if kind != "extra_forbidden":
        is_shown = isinstance(given, str | int | float) and key not in SECRET_KEYS
        got = f", got {given!r}" if is_shown else ""
        return f"{key!r} in {place}: {value_fault_text(key, kind, message)}{got}"
    known = list(_fields_at(tables))
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
    return f"unknown key {key!r} in {place}; {hint}"


_HOW_TO_WRITE = {
    "name": "a name has letters, digits, '.', '_' and '-', and begins with a letter or digit",
    "database": "write it as postgresql://USER:PASSWORD@HOST:PORT/DATABASE",
    "dataset": "write it as OWNER/NAME, or as a git URL",
    "dataset_endpoint": "write `hub`, or a URL",
    "base_model_endpoint": "write `hub`, or a URL",
    "push_to": "write it as OWNER/NAME",
    "push_endpoint": "write a URL",
    "public_url": "write it as http://HOST or https://HOST",
    "hub_url": "write it as http://HOST or https://HOST",
    "memory": "write a whole number and K, M, G or T, such as 16G",
}
"""Key → how to write the value of this key. Lists only keys whose value is checked by a regular
expression."""


def value_fault_text(key: str, kind: str, message: str) -> str:
    """Pydantic's error message about the value of `key`. If the message would show a regular
    expression, the text in `_HOW_TO_WRITE` replaces the message."""
    if kind == "string_pattern_mismatch" and key in _HOW_TO_WRITE:
        return _HOW_TO_WRITE[key]
    words = message.removeprefix("Value error, ")
    return words[0].lower() + words[1:]


def _fields_at(tables: list[str]) -> dict[str, Any]:
    model: Any = Settings
    if tables[:1] == ["launchers"]:
        return dict(LauncherSettings.model_fields)
    for table in tables:
        model = (
            PipelineSettings if table == "pipelines" else type(model.model_fields[table].default)
        )
    return dict(model.model_fields)
