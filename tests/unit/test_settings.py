import errno
import json
import re
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jobs.errors import JobError
from pipeline.cli.main import app, main
from pipeline.cli.settings import settings_text
from pipeline.errors import PipelineError
from pipeline.paths import Home
from pipeline.retrain.settings import TrainSettings
from pipeline.runner.submit import retrain_rule
from pipeline.settings import PipelineSettings, Settings, load_settings, write_settings_copy
from receiver.errors import ReceiverError
from receiver.tunnel import command_of
from serving.errors import ServingError

FACTS = PipelineSettings(name="facts", dataset="demo/facts")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIPELINE_SETTINGS", str(tmp_path / "pipeline.toml"))
    return tmp_path / "pipeline.toml"


def test_what_docs_training_shows_can_be_set(file: Path) -> None:
    docs = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    (block,) = re.findall(r"^```toml\n(.*?)^```", docs, re.MULTILINE | re.DOTALL)
    file.write_text(f'[[pipelines]]\nname = "facts"\ndataset = "local/facts"\n\n{block}')
    paraphrase = load_settings().pipeline("facts").paraphrase
    assert paraphrase is not None and paraphrase.model == "Qwen/Qwen3-8B"


def test_what_the_settings_command_prints_means_the_same(file: Path) -> None:
    file.write_text(
        '[serving]\nport = 9000\n[[pipelines]]\nname = "facts"\ndataset = "demo/facts"\n'
        "[pipelines.train]\nmax_length = 77\n"
    )
    settings = load_settings()
    text = CliRunner().invoke(app, ["settings"]).stdout
    assert "\nport = 9000\n" in text and "\nmax_length = 77\n" in text
    assert "# The branch to follow." in text and '\n# ref = "main"\n' in text
    file.write_text(text)
    assert load_settings() == settings


def test_every_commented_key_can_be_uncommented(file: Path) -> None:
    file.write_text('[[pipelines]]\nname = "facts"\ndataset = "demo/facts"\n')
    text = settings_text(load_settings())
    lines = [
        line[2:] if line.startswith("# ") and " = " in line and "`" not in line else line
        for line in text.splitlines()
    ]
    assert tomllib.loads("\n".join(lines))["hub"]["port"] == 8070
    file.write_text("\n".join(lines))
    assert load_settings().pipelines == (FACTS,)


def test_a_secret_of_the_settings_is_not_printed(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_SERVING__API_KEY", "sk-geheim")
    monkeypatch.setenv("PIPELINE_JOBS__DATABASE_URL", "postgresql+psycopg://me:geheim@host/jobs")
    text = CliRunner().invoke(app, ["settings"]).stdout
    assert "geheim" not in text
    assert "# api_key is set, but not shown" in text
    assert "# database_url is set, but not shown" in text
    assert 'dataset = "OWNER/NAME"' in text, "without a pipeline, the keys of one are shown"


def test_a_service_reads_the_copy_but_its_paths_start_at_the_file(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, other = Home(tmp_path / "state"), Home(tmp_path / "other")
    pipeline = '[[pipelines]]\nname = "facts"\ndataset = "demo/facts"\nbase_model = "{}"\n'
    file.write_text(pipeline.format("./before"))
    for home in (state, other):
        home.root.mkdir()
        write_settings_copy(home)
    file.write_text(pipeline.format("./after"))
    monkeypatch.setenv("PIPELINE_SETTINGS_COPY", str(state.settings_copy))
    for home, read in ((state, "before"), (other, "after")):
        monkeypatch.setenv("PIPELINE_HOME", str(home.root))
        assert load_settings().pipeline("facts").base_folder() == tmp_path / read


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("jobs.db", "{}/jobs.db"),
        ("~/jobs.db", "/home/me/jobs.db"),
        *(
            (same, same)
            for same in (
                "sqlite:////kept/jobs.db",
                "postgresql+psycopg://me:secret@host/jobs",
            )
        ),
    ],
)
def test_the_file_of_jobs_is_beside_the_settings(
    file: Path, monkeypatch: pytest.MonkeyPatch, given: str, read: str
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    file.write_text(f'[jobs]\ndatabase_url = "{given}"\n')
    assert load_settings().jobs.database_url == read.format(file.parent)


def test_the_program_of_the_tunnel_is_beside_the_settings(file: Path) -> None:
    def tunnel(text: str) -> str | None:
        file.write_text(f"[receiver]\ntunnel = {json.dumps(text)}\n")
        return load_settings().receiver.tunnel

    program = file.parent / "bin/open"
    program.parent.mkdir()
    program.touch(0o755)
    read = tunnel("bin/open 'a b' http://{address}")
    assert read is not None
    assert command_of(read, "host:1") == [str(program), "a b", "http://host:1"]
    for text in ("cloudflared tunnel --url http://{address}", "  "):
        assert tunnel(text) == text


def test_a_home_folder_that_is_not_known_is_a_fault_of_the_settings(file: Path) -> None:
    for text in (
        '[receiver]\ntunnel = "~nobody-here/x"\n',
        '[[pipelines]]\nname = "a"\ndataset = "o/d"\nbase_model = "~nobody-here/x"\n',
    ):
        file.write_text(text)
        with pytest.raises(PipelineError, match="the home folder in ~nobody-here/x is not known"):
            load_settings()


def test_the_environment_overrules_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("[hub]\nport = 9001\n[serving]\nport = 9002\n")
    monkeypatch.setenv("PIPELINE_HUB__PORT", "9003")
    settings = load_settings()
    assert (settings.hub.port, settings.serving.port) == (9003, 9002)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[hub]\nprot = 1\n", ["'prot'", "[hub]", "did you mean 'port'?"]),
        ("[hubs]\nport = 1\n", ["'hubs'", "the top level", "did you mean 'hub'?"]),
        ("[hub]\nzzz = 1\n", ["'zzz'", "known keys: ", "port"]),
        ('[hub]\nport = "many"\n', ["'port' in [hub]", "valid integer"]),
        ("[hub\n", ["is not TOML"]),
        ('[[pipelines]]\nname = "a"\n', ["'dataset' in [pipelines] number 1", "required"]),
        (
            '[[pipelines]]\nname = "a"\ndataset = "o/d"\n[pipelines.train]\nsede = 1\n',
            ["'sede'", "[pipelines.train]", "'seed'"],
        ),
        (
            '[[pipelines]]\nname = "a"\ndataset = "d"\n',
            ["'dataset'", "write it as OWNER/NAME, or as a git URL, got 'd'"],
        ),
        (
            '[receiver]\npublic_url = "here"\n',
            ["'public_url' in [receiver]: write it as http://HOST or https://HOST, got 'here'"],
        ),
        (
            '[[pipelines]]\nname = "a"\ndataset = "o/d"\nbase_model = "preset:big"\n',
            ["'base_model'", "there is no such preset, only preset:tiny"],
        ),
        (
            2 * '[[pipelines]]\nname = "a"\ndataset = "o/d"\n',
            ["two pipelines are called a"],
        ),
    ],
)
def test_a_fault_names_the_key_its_place_and_the_likely_spelling(
    file: Path, text: str, words: list[str]
) -> None:
    file.write_text(text)
    with pytest.raises(PipelineError) as error:
        load_settings()
    for word in [str(file), *words]:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [("PIPELINE_HUB__PORT", "valid integer"), ("PIPELINE_HUB__PROT", "did you mean 'port'?")],
)
def test_a_fault_of_the_environment_is_not_blamed_on_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    file.write_text("[hub]\nport = 9001\n")
    monkeypatch.setenv(name, "x")
    with pytest.raises(PipelineError) as error:
        load_settings()
    assert str(error.value).startswith(f"{name}: ") and words in str(error.value)
    assert str(file) not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("PIPELINE_LOGS", "debug"), ("PIPELINE_HUB__DELIVERY_SCHEDULE_SECONDS", "1,5")],
)
def test_a_variable_that_must_be_json_is_named(
    file: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(PipelineError, match="write a list or a table as JSON"):
        load_settings()


def test_a_file_that_is_not_utf_8_is_named(file: Path) -> None:
    file.write_bytes("# f\xfcr uns\n".encode("latin-1"))
    with pytest.raises(PipelineError, match=f"^{re.escape(str(file))} is not TOML: "):
        load_settings()


def test_a_base_model_that_is_not_there_is_known_before_it_is_needed(tmp_path: Path) -> None:
    def missing(base_model: str) -> str | None:
        return FACTS.model_copy(update={"base_model": base_model}).missing_base()

    (tmp_path / "config.json").write_text("{}")
    assert [missing(each) for each in ("preset:tiny", "me/base", str(tmp_path))] == [None] * 3
    assert "/nonexistent is not there" in str(missing("/nonexistent"))
    assert "no config.json" in str(missing(str(tmp_path.parent)))


def test_the_only_pipeline_needs_no_name(file: Path) -> None:
    settings = Settings.model_construct(pipelines=(FACTS,))
    assert settings.pipeline(None) == FACTS
    with pytest.raises(PipelineError, match="no pipeline is called 'x'; configured are: facts"):
        settings.pipeline("x")
    with pytest.raises(PipelineError, match="pipeline init"):
        Settings.model_construct(pipelines=()).pipeline(None)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        *[(kind("why"), "why") for kind in (JobError, PipelineError, ReceiverError, ServingError)],
        (OSError(errno.ENOSPC, "no space left", "a.txt"), "a.txt cannot be opened or written: no"),
    ],
)
def test_a_fault_of_the_user_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, line: str
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("pipeline.cli.main.app", fail)
    with pytest.raises(SystemExit, match=f"^pipeline: {line}"):
        main()


def test_an_address_of_ipv6_stands_in_brackets(file: Path) -> None:
    file.write_text('[serving]\nhost = "::1"\n[hub]\nhost = "::1"\n')
    settings = load_settings()
    pipeline = PipelineSettings(name="a", dataset="o/d", port=8000)
    assert settings.server_url(pipeline) == "http://[::1]:8000"
    assert settings.hub_url == "http://[::1]:8070"


def test_the_digest_tells_settings_that_shape_the_weights_from_those_that_do_not() -> None:
    plain = TrainSettings().digest()
    assert TrainSettings(max_tokens=7).digest() != plain
    assert TrainSettings(max_tokens=TrainSettings().max_tokens).digest() == plain
    assert TrainSettings(checkpoint_seconds=1, micro_batch_tokens=64).digest() == plain


ON_SLURM = """
[launchers.slurm]
options = ["--account=me"]
[launchers.own]
submit = ["./start", "$name"]
status = ["ask", "$name"]
cancel = ["end", "$name"]
states = { running = "up", unknown = ["none", "gone"] }
[[pipelines]]
name = "facts"
dataset = "demo/facts"
launcher = "slurm"
[pipelines.resources]
gpus = 1
"""


def test_a_launcher_is_a_preset_and_what_the_file_changes(file: Path) -> None:
    file.write_text(ON_SLURM)
    settings = load_settings()
    slurm, own = settings.launchers["slurm"], settings.launchers["own"]
    assert (slurm.submit[0], slurm.options) == ("sbatch", ("--account=me",))
    assert (own.submit[0], own.status[0]) == (f"{file.parent}/start", "ask")
    spec = retrain_rule(settings, Home(file.parent), settings.pipeline("facts")).spec
    assert (spec.launcher, spec.resources.gpus) == ("slurm", 1)
    file.write_text(CliRunner().invoke(app, ["settings"]).stdout)
    assert load_settings() == settings, "what the settings command prints means the same"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('= "slurm"', '= "slrm"', "none of this name, only local, slurm, own; add"),
        ('launcher = "slurm"', "", "launcher 'local': it takes no [pipelines.resources] and"),
        ("gpus = 1", 'image = "x"', "'submit' passes no image on; remove it".replace("'", "`")),
        ("gpus = 1", "nodes = 2", "`resources.nodes` needs `train.checkpoint_url`: a place"),
        ("options", 'preset = "ray"\noptions', ""),
        ("[[", '[hub]\njobs_launcher = "slurm"\n[[', "hub.jobs_launcher: launcher 'slurm': its"),
        ("options", 'preset = "kubernetes"\noptions', "it needs image; set it under [pipelines"),
        ("gpus = 1", 'memory = "16g"', "a whole number and K, M, G or T, such as 16G, got '16g'"),
        ("options", "option", "unknown key 'option' in [launchers.slurm]; did you mean 'options'"),
        ('"ask", "$name"', '"ask", "$nam"', "'$nam' has another value than $name, $options;"),
    ],
)
def test_what_a_launcher_cannot_do_is_refused(file: Path, old: str, new: str, told: str) -> None:
    assert old in ON_SLURM
    file.write_text(ON_SLURM.replace(old, new, 1))
    if not told:
        assert load_settings().launchers["slurm"].submit[0] == "ray"
        return
    with pytest.raises(PipelineError, match=re.escape(told)):
        load_settings()
