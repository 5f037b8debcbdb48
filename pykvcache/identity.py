# SPDX-License-Identifier: Apache-2.0
"""What the bytes of a chunk depend on besides its key, and the proof of it on disk.

Two servers share files exactly when these fields agree: the directory's name carries
the fingerprint, ``identity.json`` in it the fields, and every file's trailer the
fingerprint again. A file of another identity is a miss, never a load.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from functools import cached_property
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from pykvcache.access import PRIVATE, Access, make_directories
from pykvcache.errors import ConfigError
from pykvcache.layout import FORMAT_VERSION, model_directory

FILE_NAME = "identity.json"


class _Facts(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @cached_property
    def canonical(self) -> str:
        """The fields as JSON with sorted names: equal text means equal facts."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=1)

    @cached_property
    def fingerprint(self) -> bytes:
        """SHA-256 of :attr:`canonical`, 32 bytes."""
        return hashlib.sha256(self.canonical.encode()).digest()


class Identity(_Facts):
    """What all ranks of a server have in common; the README says what each field guards.

    ``engine`` is the inference engine with its version, ``device`` the kind of device and
    whatever of it decides the layout inside a page, ``weights`` a fingerprint of the model's
    effective configuration and of local weights, ``tokens_per_block`` that of each KV cache group.
    """

    format_version: int = FORMAT_VERSION
    engine: str
    device: str
    model: str
    revision: str
    weights: str
    cache_dtype: str
    kv_cache_layout: str
    tokens_per_hash: int
    hash_algorithm: str
    hash_seed: str
    blocks_per_chunk: int
    tokens_per_block: tuple[int, ...]
    tensor_parallel_size: int
    pipeline_parallel_size: int
    prefill_context_parallel_size: int
    decode_context_parallel_size: int
    namespace: str

    def directory(self, root: Path) -> Path:
        """Where the files of this identity lie under ``root``."""
        return model_directory(root, self.model, self.fingerprint)


class TierIdentity(Identity):
    """Of files that hold rows of vLLM's CPU tier instead of one rank's pages: all ranks' bytes,
    in an order that vLLM chooses, so that no file can be taken for one of the other kind.

    ``row_layout`` says whose bytes a row of ``row_bytes`` bytes holds.
    """

    row_bytes: int
    row_layout: str


class RankIdentity(_Facts):
    """What one rank's bytes depend on beyond the server: which layers it holds, in which
    pages. Its fingerprint is the one in the trailers.

    ``layers`` and ``page_bytes`` have one entry for each KV cache group.
    """

    server: str
    rank: int
    layers: tuple[tuple[str, ...], ...]
    page_bytes: tuple[tuple[int, ...], ...]


def claim_directory(
    facts: Identity | RankIdentity, directory: Path, root: Path, access: Access = PRIVATE
) -> None:
    """Make the directory with its ``identity.json``, or check the one that is there.

    Args:
        facts: what the directory's files depend on.
        directory: :meth:`Identity.directory`, or a rank's directory in it.
        root: the option.
        access: whose the directory is, or may be.

    Raises:
        ConfigError: the directory holds another identity's file, cannot be written, or could
            be changed by others.
    """
    claim_for(facts.canonical.encode(), directory, root, access)


def claim_for(expected: bytes, directory: Path, root: Path, access: Access) -> None:
    """As :func:`claim_directory`, for what ``identity.json`` is to hold."""
    path = directory / FILE_NAME
    try:
        make_directories(directory, root, access)
        if not os.path.lexists(path):
            _publish(path, expected, access)
        found = _read(path, len(expected) + 1)
    except OSError as error:
        where = f": '{error.filename}'" if error.filename else ""  # a failed write names none
        raise ConfigError(
            f"option 'root' is '{root}': cannot keep files there ({error.strerror}{where}); it "
            "must be a directory that this user can write, on a filesystem with free space"
        ) from None
    if found != expected:
        raise ConfigError(
            f"option 'root' is '{root}': '{path}' does not describe this server's cache; "
            "remove that directory, or choose another root or namespace"
        )


def _read(path: Path, bytes_max: int) -> bytes:
    """No more than that: who compares need not know what else there is. Never opens what a
    symbolic link names, nor waits for who writes into a pipe."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(os.open(path, flags), "rb") as file:
        return file.read(bytes_max) or b""


def _publish(path: Path, text: bytes, access: Access) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")

    def create(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, access.file_mode)

    try:
        with open(temporary, "xb", opener=create) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # what a loss of power left of it would be refused
        with contextlib.suppress(FileExistsError):  # another process was first: compare below
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
