# SPDX-License-Identifier: Apache-2.0
"""Which servers share files, and the directory that says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeVar

import pytest
from pydantic import ValidationError

from pykvcache.errors import ConfigError
from pykvcache.identity import FILE_NAME, Identity, RankIdentity, claim_directory
from pykvcache.layout import FORMAT_VERSION, rank_directory

REPOSITORY = Path(__file__).resolve().parents[2]

IDENTITY = Identity(
    engine="vllm 0.32.0",
    device="cpu",
    model="org/model",
    revision="main",
    weights="",
    cache_dtype="bfloat16",
    kv_cache_layout="NHD",
    tokens_per_hash=16,
    hash_algorithm="sha256",
    hash_seed="0",
    blocks_per_chunk=16,
    tokens_per_block=(16, 32),
    tensor_parallel_size=1,
    pipeline_parallel_size=1,
    prefill_context_parallel_size=1,
    decode_context_parallel_size=1,
    namespace="",
)
RANK = RankIdentity(
    server=IDENTITY.fingerprint.hex(),
    rank=0,
    layers=(("layer.0", "layer.1"), ("layer.2",)),
    page_bytes=((4096, 4096), (512,)),
)


Facts = TypeVar("Facts", bound=Identity | RankIdentity)


def changed(value: Any) -> list[Any]:
    """Values that differ from this one in one respect."""
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, str):
        return [f"{value}x"]
    inner = [
        (*value[:index], other, *value[index + 1 :])
        for index, item in enumerate(value)
        for other in changed(item)
    ]
    return [other for other in (*inner, value[:-1], value[::-1]) if other != value]


def changed_to(facts: Facts, field: str, value: object) -> Facts:
    """The facts with another value in one field; a copy would keep the old fingerprint."""
    return type(facts)(**{**facts.model_dump(), field: value})


OTHERS = [
    (facts, name, other)
    for facts in (IDENTITY, RANK)
    for name in type(facts).model_fields
    for other in changed(getattr(facts, name))
]


@pytest.mark.parametrize(
    ("facts", "field", "value"), OTHERS, ids=[f"{name}-{value}" for _, name, value in OTHERS]
)
def test_each_field_changes_the_fingerprint(
    facts: Identity | RankIdentity, field: str, value: object
) -> None:
    other = changed_to(facts, field, value)
    assert other.fingerprint != facts.fingerprint


def test_servers_that_differ_have_other_directories() -> None:
    other = changed_to(IDENTITY, "namespace", "b")
    assert other.directory(Path("/data")) != IDENTITY.directory(Path("/data"))
    assert IDENTITY.directory(Path("/data")).name == f"model-{IDENTITY.fingerprint.hex()[:16]}"


def test_the_fingerprint_is_that_of_equal_fields_only() -> None:
    assert Identity(**IDENTITY.model_dump()).fingerprint == IDENTITY.fingerprint
    assert len(IDENTITY.fingerprint) == 32
    assert IDENTITY.format_version == FORMAT_VERSION
    assert json.loads(IDENTITY.canonical) == IDENTITY.model_dump(mode="json")


def test_an_unknown_or_missing_field_is_a_bug() -> None:
    with pytest.raises(ValidationError):
        Identity(**{**IDENTITY.model_dump(), "extra": 1})
    with pytest.raises(ValidationError):
        Identity(
            **{name: value for name, value in IDENTITY.model_dump().items() if name != "model"}
        )


def claim(root: Path, identity: Identity = IDENTITY) -> Path:
    """Claim the identity's directory under the root; returns it."""
    directory = identity.directory(root)
    claim_directory(identity, directory, root)
    return directory


def test_a_directory_is_claimed_and_found_again(tmp_path: Path) -> None:
    root = tmp_path / "not" / "there"
    directory = claim(root)
    assert directory == IDENTITY.directory(root)
    assert (directory / FILE_NAME).read_text() == IDENTITY.canonical
    assert directory.stat().st_mode & 0o077 == 0, "what users wrote is not for everybody"
    assert (directory / FILE_NAME).stat().st_mode & 0o077 == 0
    before = (directory / FILE_NAME).stat()
    assert claim(root) == directory
    assert (directory / FILE_NAME).stat().st_ino == before.st_ino
    assert [path.name for path in directory.iterdir()] == [FILE_NAME], "no temporary is left"


def test_a_rank_claims_its_directory_in_the_servers(tmp_path: Path) -> None:
    directory = rank_directory(claim(tmp_path), 0)
    claim_directory(RANK, directory, tmp_path)
    assert (directory / FILE_NAME).read_text() == RANK.canonical
    claim_directory(RANK, directory, tmp_path)
    other = changed_to(RANK, "page_bytes", ((4096, 4096), (1024,)))
    with pytest.raises(ConfigError, match="does not describe this server's cache"):
        claim_directory(other, directory, tmp_path)


def test_another_identity_lies_beside_it(tmp_path: Path) -> None:
    other = changed_to(IDENTITY, "namespace", "b")
    assert claim(tmp_path) != claim(tmp_path, other)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe\x00 not text"])
def test_a_directory_of_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    directory = claim(tmp_path)
    path = directory / FILE_NAME
    path.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        claim(tmp_path)
    message = str(refused.value)
    assert message.startswith(f"option 'root' is '{tmp_path}': '{path}' does not describe")
    assert "choose another root or namespace" in message
    assert path.read_bytes() == content, "nothing of somebody else's is overwritten"


def test_an_identity_that_is_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    directory = claim(tmp_path / "root")
    (directory / FILE_NAME).rename(tmp_path / "elsewhere")
    (directory / FILE_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="Too many levels of symbolic links"):
        claim(tmp_path / "root")


def test_an_identity_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    directory = claim(tmp_path)
    (directory / FILE_NAME).unlink()
    os.mkfifo(directory / FILE_NAME)
    with pytest.raises(ConfigError, match="does not describe this server's cache"):
        claim(tmp_path)


def test_a_root_below_a_file_is_refused(tmp_path: Path) -> None:
    blocking = tmp_path / "file"
    blocking.write_text("")
    with pytest.raises(ConfigError) as refused:
        claim(blocking / "root")
    message = str(refused.value)
    assert message.startswith(f"option 'root' is '{blocking}/root': cannot keep files there")
    assert "Not a directory" in message
    assert "it must be a directory that this user can write" in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_root_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ConfigError, match="Permission denied"):
            claim(tmp_path / "root")
    finally:
        tmp_path.chmod(0o700)


def run_claim(root: Path, prelude: str = "") -> subprocess.Popen[str]:
    """Another process that claims the directory and prints the outcome."""
    program = f"""
{prelude}
from pathlib import Path
from pykvcache.errors import ConfigError
from pykvcache.identity import Identity, claim_directory
identity = Identity.model_validate_json({IDENTITY.canonical!r})
root = Path({str(root)!r})
try:
    claim_directory(identity, identity.directory(root), root)
    print("claimed")
except ConfigError as error:
    print("refused:", error)
"""
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )


def test_a_full_disk_is_refused_without_a_trace(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"
    output, _ = run_claim(tmp_path / "root", limit).communicate()
    assert output.startswith(
        f"refused: option 'root' is '{tmp_path}/root': cannot keep files there"
    )
    assert "File too large" in output
    assert "None" not in output
    directory = IDENTITY.directory(tmp_path / "root")
    assert list(directory.iterdir()) == [], "no temporary is left"


def test_processes_that_race_agree(tmp_path: Path) -> None:
    racing = [run_claim(tmp_path / "root") for _ in range(4)]
    outputs = [process.communicate()[0].strip() for process in racing]
    directory = IDENTITY.directory(tmp_path / "root")
    assert outputs == ["claimed"] * 4
    assert (directory / FILE_NAME).read_text() == IDENTITY.canonical
    assert [path.name for path in directory.iterdir()] == [FILE_NAME]


def test_the_loser_of_a_race_takes_the_winners_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def late_link(source: str, target: Path) -> None:
        monkeypatch.undo()
        claim(tmp_path)  # the other process, just before
        link(source, target)

    monkeypatch.setattr(os, "link", late_link)
    directory = claim(tmp_path)
    assert [path.name for path in directory.iterdir()] == [FILE_NAME]
