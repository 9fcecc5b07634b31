"""`pipeline env`: prints shell commands that make git and the Hugging Face clients use the hub."""

import shlex

import typer

from pipeline.paths import Home, settings_file
from pipeline.retrain.sources import TOKEN_OF_ENV
from pipeline.settings import no_settings_file
from pipeline.stack.record import running_settings
from pipeline.tokens import load_tokens
from receiver.settings import PROJECT_OF_SHELL, project_folder

app = typer.Typer()


def environment(hub_url: str, hub_token: str) -> dict[str, str]:
    """The environment variables that a client of the hub needs.

    The variables also set up a credential helper for git. The helper gives git the token from
    `HF_TOKEN`, so that nobody has to write the token into a URL or into a configuration file.
    """
    helper = '!f() { test "$1" = get && echo username=pipeline && echo "password=$HF_TOKEN"; }; f'
    key = f"credential.{hub_url}.helper"
    return {
        "HF_ENDPOINT": hub_url,
        "HF_TOKEN": hub_token,
        TOKEN_OF_ENV: hub_token,
        # Switch off Xet, which uploads files in chunks. The hub accepts such uploads too. But plain
        # HTTP is faster on one machine, and with Xet the hub would have to store the chunks in
        # addition to the files.
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        PROJECT_OF_SHELL: str(project_folder()),
        "GIT_CONFIG_COUNT": "2",
        # The empty value makes git ignore, for this URL, all credential helpers from git's
        # configuration files.
        "GIT_CONFIG_KEY_0": key,
        "GIT_CONFIG_VALUE_0": "",
        "GIT_CONFIG_KEY_1": key,
        "GIT_CONFIG_VALUE_1": helper,
    }


@app.command()
def env() -> None:
    """Print shell commands that make git and the Hugging Face clients use the hub. To run these
    commands: eval "$(pipeline env)"."""
    home = Home.find()
    # `load_tokens` creates a missing token file. So if PIPELINE_HOME or PIPELINE_SETTINGS is wrong,
    # fail here. Otherwise this command would create and print tokens that belong to no stack.
    if not (settings_file().exists() or home.tokens_file.exists()):
        raise no_settings_file()
    exports = environment(running_settings(home).hub_url, load_tokens(home.tokens_file).hub)
    for name, value in exports.items():
        print(f"export {name}={shlex.quote(value)}")
