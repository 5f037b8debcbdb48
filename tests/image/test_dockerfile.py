# SPDX-License-Identifier: Apache-2.0
"""The Dockerfile: linted, in step with what the build reads and with docs/docker.md."""

from __future__ import annotations

import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from scripts.distribution.backend import SOURCES

REPOSITORY = Path(__file__).resolve().parents[2]
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()
DOCUMENT = (REPOSITORY / "docs" / "docker.md").read_text()
COMMANDS = "\n".join(re.findall(r"(?ms)^```(?:sh|console)\n(.*?)^```", DOCUMENT))


def stages() -> dict[str, str]:
    """Name -> text of each stage."""
    parts = re.split(r"(?m)^FROM \S+ AS (\S+)\n", DOCKERFILE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize(
    "command",
    [
        ("hadolint", "Dockerfile"),
        ("shellcheck", "docker/pykvcache-serve", "scripts/image_test.sh"),
    ],
    ids=lambda command: command[0],
)
def test_it_is_linted(command: tuple[str, ...]) -> None:
    linter = Path(sys.executable).with_name(command[0])
    if not linter.is_file():
        pytest.skip(f"{linter} isn't installed")
    done = subprocess.run(
        [linter, *command[1:]], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_it_builds_with_buildah_too() -> None:
    assert "<<" not in DOCKERFILE
    assert "--link" not in DOCKERFILE.replace("`COPY --link`", "")


def test_both_targets_run_alike() -> None:
    def runtime(target: str) -> list[str]:
        lines = stages()[target].partition("COPY docker/")[2].strip().splitlines()
        return [line.replace("PATH=/opt/vllm/bin:$PATH ", "") for line in lines]

    assert runtime("cpu") == runtime("cuda")
    assert list(stages())[-1] == "cuda", "the default is the last"


def test_no_target_runs_as_root() -> None:
    for target in ("cpu", "cuda"):
        assert re.findall(r"(?m)^USER (.+)$", stages()[target])[-1] == "10001:10001"


def test_the_build_sees_all_that_it_reads() -> None:
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    allowed = [line[1:] for line in lines if line.startswith("!")]
    copied = re.findall(r"(?m)^COPY (docker/\S+) (docker/\S+) ", DOCKERFILE)
    assert lines[1] == "*"
    assert copied
    for name in (*SOURCES, *(name for pair in copied for name in pair)):
        assert any(fnmatch(name, pattern) for pattern in allowed), name
        assert (REPOSITORY / name).exists()


def test_no_registry_or_pip_configuration_is_in_it() -> None:
    assert re.findall(r"https?://[^\s\"}]+", DOCKERFILE) == ["https://download.pytorch.org/whl/cpu"]
    assert "PIP_" not in DOCKERFILE


# --- the documented commands


def test_there_are_commands() -> None:
    assert COMMANDS.count("docker build") >= 2
    assert COMMANDS.count("docker run") >= 2


def test_the_readme_runs_the_cuda_image_as_documented() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    found = re.search(r"(?m)^    docker run (?:.*\\\n)*.*$", readme)
    assert found
    assert " ".join(found[0].split()) in " ".join(COMMANDS.split())


def test_documented_targets_and_arguments_exist() -> None:
    assert set(re.findall(r"--target[ =](\S+)", COMMANDS)) <= {"cpu", "cuda"}
    arguments = set(re.findall(r"--build-arg[ =](\w+)=", COMMANDS))
    assert arguments
    assert arguments <= set(re.findall(r"(?m)^ARG (\w+)=", DOCKERFILE))


def test_documented_runs_use_the_images_paths() -> None:
    volume = re.search(r"(?m)^VOLUME (\S+)$", DOCKERFILE)
    port = re.search(r"(?m)^EXPOSE (\d+)$", DOCKERFILE)
    home = re.search(r"(?m)^WORKDIR (/home\S+)$", DOCKERFILE)
    assert volume and port and home
    targets = re.findall(r"(?:-v|--volume)[ =][^\s:]+:(/[^\s:]+)", COMMANDS)
    assert volume[1] in targets
    assert {path for path in targets if not path.startswith((volume[1], home[1]))} <= {"/model"}
    assert set(re.findall(r"(?:-p|--publish)[ =]\d+:(\d+)", COMMANDS)) == {port[1]}
    assert f"PYKVCACHE_ROOT={volume[1]}" in DOCKERFILE


def test_documented_files_exist() -> None:
    named = set(re.findall(r"(?:docker|scripts)/[\w-]+\.(?:py|sh)", DOCUMENT))
    assert {"docker/seccomp.py", "scripts/image_test.sh"} <= named
    assert all((REPOSITORY / name).is_file() for name in named)
