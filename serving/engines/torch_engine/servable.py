"""Says of a checkpoint folder whether the torch engine can serve its network, without weights."""

import json
from pathlib import Path

from serving.engine import StageError
from serving.engines.torch_engine import architecture, generic
from serving.errors import ReleaseError


def check_servable(folder: Path) -> None:
    """Raises ReleaseError if the network of `config.json` keeps a state for each sequence, if it is
    unknown, or if its weights are quantised. No tensor is read.

    Does nothing if `config.json` is no configuration of a network that is named: publishing judges
    that.
    """
    try:
        names = json.loads((folder / architecture.CONFIG_FILE).read_bytes())["architectures"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    try:
        config = architecture.read_config(folder)
        if names and architecture.llama_shape(config) is None:
            generic.layer_shapes(folder)
    except StageError as error:
        raise ReleaseError(*error.reasons) from error
