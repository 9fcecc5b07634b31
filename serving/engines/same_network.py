"""Tells whether a release has the same network as the one that vLLM runs. vLLM can replace its
weights while it runs, but not its network."""

from pathlib import Path

from serving.weights.network import CONFIG_FILE
from serving.weights.release import RELEASE_FILE, Release, read_json

# Settings in `config.json` that do not change the network.
_FREE_KEYS = {
    *("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "use_cache"),
}

# Tensors of these dtypes can replace each other, because they are converted when they are loaded.
_PLAIN_DTYPES = {"F64", "F32", "F16", "BF16"}


def config_differences(running: Path, wanted: Path) -> list[str]:
    """The differences between the `config.json` of two folders, one sentence each. vLLM runs the
    first one."""
    old, new = (read_json(folder / CONFIG_FILE) for folder in (running, wanted))
    return [
        f"config.json: {key} is {new.get(key)!r}, vLLM runs {old.get(key)!r}"
        for key in sorted((old.keys() | new.keys()) - _FREE_KEYS)
        if old.get(key) != new.get(key)
    ]


def tensor_differences(running: Release, wanted: Release) -> list[str]:
    """The tensors of `wanted` that do not fit the network of `running`, which vLLM runs, and those
    that are missing; one sentence each."""
    old, new = _forms(running), _forms(wanted)
    reasons = []
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            file = wanted.tensors[name].file if name in new else RELEASE_FILE
            found, expected = new.get(name, "missing"), old.get(name, "no such tensor")
            reasons.append(f"{file}: tensor {name}: {found}, vLLM runs {expected}")
    return reasons


def _forms(release: Release) -> dict[str, str]:
    return {
        name: f"{'float' if entry.dtype in _PLAIN_DTYPES else entry.dtype} {list(entry.shape)}"
        for name, entry in release.tensors.items()
    }
