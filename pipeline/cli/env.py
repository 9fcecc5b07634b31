"""`pipeline env`: shell exports that point git and the Hugging Face clients at the hub."""

import os
import shlex

from pipeline.errors import PipelineError
from pipeline.paths import Home


def environment(hub_url: str, hub_token: str, home: Home) -> dict[str, str]:
    """What a client of the hub needs in its environment.

    The token is in the environment alone: git asks a helper that is scoped to the hub's URL, so no
    token stands in a remote's URL or in a git configuration.
    """
    helper = '!f() { test "$1" = get && echo username=pipeline && echo "password=$HF_TOKEN"; }; f'
    key = f"credential.{hub_url}.helper"
    return {
        "HF_ENDPOINT": hub_url,
        "HF_TOKEN": hub_token,
        # The hub keeps no Xet store; uploads go through git.
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "PIPELINE_HOME": str(home.root),
        "GIT_CONFIG_COUNT": "2",
        # An empty helper first: it drops those that the machine has configured for every host.
        "GIT_CONFIG_KEY_0": key,
        "GIT_CONFIG_VALUE_0": "",
        "GIT_CONFIG_KEY_1": key,
        "GIT_CONFIG_VALUE_1": helper,
    }


def env() -> None:
    """Print exports for a shell: eval "$(pipeline env)"."""
    from pipeline.settings import load_settings, settings_file
    from pipeline.tokens import load_tokens

    home = Home.find()
    if not (settings_file().exists() or home.tokens_file.exists()):
        raise PipelineError(
            f"there is no {settings_file().name} in {settings_file().parent}; change to the folder "
            "of your project, or begin one there: pipeline init --name NAME --dataset OWNER/NAME"
        )
    exports = environment(load_settings().hub_url, load_tokens(home.tokens_file).hub, home)
    if "PIPELINE_SETTINGS" in os.environ or settings_file().exists():
        exports["PIPELINE_SETTINGS"] = str(settings_file())
    for name, value in exports.items():
        print(f"export {name}={shlex.quote(value)}")
