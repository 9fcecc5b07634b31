"""Tells whether a release has the same network as the one that vLLM or SGLang runs. Both can
replace their weights while they run, but not their network."""

from pathlib import Path

from serving.weights.release import RELEASE_FILE, Release, TensorEntry, read_json

# Settings in `config.json` that do not change the network.
_FREE_KEYS = {
    *("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "use_cache"),
}

# Tensors of these dtypes can replace each other, because they are converted when they are loaded.
_PLAIN_DTYPES = {"F64", "F32", "F16", "BF16"}


def config_differences(running: Path, wanted: Path, runner: str) -> list[str]:
    """The differences between the `config.json` of two folders, one sentence each. `runner` is the
    name of the program that runs the first one, for the messages."""
    old, new = (read_json(folder / "config.json") for folder in (running, wanted))
    return [
        f"config.json: {key} is {new.get(key)!r}, {runner} runs {old.get(key)!r}"
        for key in sorted((old.keys() | new.keys()) - _FREE_KEYS)
        if old.get(key) != new.get(key)
    ]


def tensor_differences(running: Release, wanted: Release, runner: str) -> list[str]:
    """The tensors of `wanted` that do not fit the network of `running`, and those that are missing;
    one sentence each. `runner` is the name of the program that runs the network."""
    reasons = []
    for name, entry in wanted.tensors.items():
        before = running.tensors.get(name)
        if before is None:
            reasons.append(
                f"{entry.file}: tensor {name}: unknown to the network that {runner} runs"
            )
        elif not _fits(before, entry):
            reasons.append(
                f"{entry.file}: tensor {name}: {entry.dtype} {list(entry.shape)} in place of "
                f"{before.dtype} {list(before.shape)}"
            )
    missing = running.tensors.keys() - wanted.tensors.keys()
    return [*reasons, *(f"{RELEASE_FILE}: tensor {name}: missing" for name in sorted(missing))]


def _fits(before: TensorEntry, entry: TensorEntry) -> bool:
    if before.shape != entry.shape:
        return False
    return before.dtype == entry.dtype or {before.dtype, entry.dtype} <= _PLAIN_DTYPES
