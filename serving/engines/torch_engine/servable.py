"""Says of a checkpoint folder whether the torch engine can serve its network, without weights."""

from pathlib import Path

from serving.engine import StageError
from serving.engines.torch_engine import architecture, generic
from serving.errors import ReleaseError
from serving.weights.network import CONFIG_FILE
from serving.weights.release import read_json


def check_servable(folder: Path) -> None:
    """Raises ReleaseError if the network of `config.json` keeps a state for each sequence, if it is
    unknown, or if its weights are quantised. No tensor is read.

    Does nothing if `config.json` names no architecture, because then the network is not known.
    """
    if not read_json(folder / CONFIG_FILE).get("architectures"):
        return
    try:
        if architecture.llama_shape(architecture.read_config(folder)) is None:
            generic.layer_shapes(folder)
    except StageError as error:
        raise ReleaseError(*error.reasons) from error
