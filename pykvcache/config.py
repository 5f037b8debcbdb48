# SPDX-License-Identifier: Apache-2.0
"""Every option and every limit, each with its unit, default, reason and check.

Options come from vLLM's ``kv_connector_extra_config``; those marked so can also be
set by an environment variable ``PYKVCACHE_<NAME>``. An explicit option wins over the
environment, the environment over the default. Nothing else in this package reads the
environment or parses an option.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from pykvcache.errors import ConfigError
from pykvcache.option_errors import (
    CONNECTOR_KEYS,
    REPLACED_KEYS,
    describe_errors,
    replaced_option,
    unknown_option,
)
from pykvcache.sizes import ACCEPTED, parse_size

MIB = 1 << 20
GIB = 1 << 30

ENVIRONMENT_PREFIX = "PYKVCACHE_"


def default_root(environment: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_CACHE_HOME/pykvcache``, else ``~/.cache/pykvcache`` (XDG Base Directory)."""
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "pykvcache"


class Config(BaseModel):
    """The validated options of one server; frozen, and the same on every process of it."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    root: Path = Field(
        default_factory=default_root,
        description="Directory of the KV files; a local NVMe drive or a shared filesystem.",
        json_schema_extra={"environment": True},
    )
    namespace: str = Field(
        default="",
        max_length=128,
        pattern=r"^[A-Za-z0-9._-]*$",
        description="Servers share chunks only within one namespace, such as a tenant or a "
        "deployment; part of the identity.",
        json_schema_extra={"environment": True},
    )
    tokens_per_chunk: int = Field(
        default=256,
        ge=1,
        description="Tokens in one file. Larger files read faster, smaller ones waste less of a "
        "prompt's tail; 256 gives files of 5 to 30 MiB, which saturate a drive at depth 8.",
        json_schema_extra={"environment": True},
    )
    io_depth: int = Field(
        default=8,
        ge=1,
        le=256,
        description="Reads and writes in flight. 8 saturates the drives measured; more only "
        "takes slots.",
        json_schema_extra={"environment": True},
    )
    open_lookahead: int = Field(
        default=16,
        ge=1,
        le=1024,
        description="Files opened or created ahead of their read or write: twice the depth hides "
        "the open behind the transfers, and bounds descriptors.",
    )
    copy_headroom: int = Field(
        default=4,
        ge=1,
        le=256,
        description="Slots beyond io_depth, so that chunks being copied to or from the device "
        "cannot drain the disk's queue.",
    )
    direct_io: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="O_DIRECT: 'auto' uses it where the filesystem takes it and warns where not, "
        "'on' refuses to start without it.",
        json_schema_extra={"environment": True},
    )
    io_engine: Literal["auto", "io_uring", "threads"] = Field(
        default="auto",
        description="'auto' uses io_uring where the kernel and the sandbox allow it, else "
        "threads, with a warning; 'io_uring' refuses to start without it.",
        json_schema_extra={"environment": True},
    )
    preload_lookahead: int = Field(
        default=16,
        ge=0,
        le=1024,
        description="Requests from the head of vLLM's waiting queue whose chunks are read ahead "
        "into the pool; 0 turns preloading off. Enough to keep the disk busy over a long "
        "prefill, few enough to look at in every step.",
        json_schema_extra={"environment": True},
    )
    preload_depth: int = Field(
        default=4,
        ge=1,
        le=256,
        description="Reads ahead in flight, at most io_depth: half of it fills the drive when "
        "nothing else is read, and a load that arrives waits behind no more than these.",
    )
    preload_slots_max: int = Field(
        default=0,
        ge=0,
        description="Slots that chunks read ahead may hold until their request runs; 0: all but "
        "io_depth + copy_headroom of the pool, which loads and stores always find.",
    )
    preload_bytes_max: int = Field(
        default=0,
        ge=0,
        description="Bytes of chunks read ahead and not used yet; 0: as many as the slots hold. "
        "For pools whose slots are much larger than the chunks of some KV groups.",
    )
    preload_ttl_s: float = Field(
        default=120.0,
        gt=0,
        description="Seconds after which a chunk read ahead whose request has not run is like "
        "any other chunk in DRAM, and read no second time for that request.",
    )
    gate: Literal["auto", "always", "off"] = Field(
        default="auto",
        description="Whether a hit is loaded only where that is faster than computing ('auto', by "
        "a calibration of this machine, else by what is learned while serving), or always; "
        "'always' still counts what 'auto' would decline, 'off' measures nothing.",
        json_schema_extra={"environment": True},
    )
    gate_path: str = Field(
        default="",
        description="File written by 'pykvcache calibrate'; empty: the one under the root that "
        "fits this machine, model and settings, if there is one.",
        json_schema_extra={"environment": True},
    )
    gate_margin: float = Field(
        default=0.02,
        ge=0,
        lt=1,
        description="Share of the time to compute that a load must save, since it costs the disk "
        "something; what it leaves of the GPU to others speaks against a larger one.",
    )
    dram_policy: Literal["auto", "none", "lru", "arc"] = Field(
        default="auto",
        description="Which chunks stay in the pool after their transfer: the last used ('lru'), "
        "balanced with the often used ('arc', Megiddo and Modha 2003), or none. 'auto' is 'lru' "
        "when the pool is larger than staging needs, which --kv-offloading-size decides.",
        json_schema_extra={"environment": True},
    )
    read_bandwidth_max: int = Field(
        default=0,
        ge=0,
        description="Bytes per second read at most by each rank, 0 for no limit; reading ahead "
        "waits first, a request's own reads last. For filesystems shared with others.",
        json_schema_extra={"environment": True},
    )
    write_bandwidth_max: int = Field(
        default=0,
        ge=0,
        description="Bytes per second written at most by each rank, 0 for no limit. For shared "
        "filesystems and the wear of a drive.",
        json_schema_extra={"environment": True},
    )
    verify: Literal["full", "sampled", "header", "off"] = Field(
        default="full",
        description="What is compared when a chunk is read: its checksum always ('full'), once "
        "in verify_every reads ('sampled') or never ('header': only the trailer page, which "
        "says what the file is). 'off' does not even ask whether that page is intact.",
        json_schema_extra={"environment": True},
    )
    verify_every: int = Field(
        default=16,
        ge=1,
        description="Reads of which one is compared if verify is 'sampled': finds a bad drive "
        "soon at a sixteenth of the cost.",
    )
    durability: Literal["none", "fsync"] = Field(
        default="none",
        description="What a loss of power may cost: chunks that the system had not written "
        "back, of which checksums make misses ('none'), or no chunk whose store had ended "
        "('fsync', which waits for the storage; for shared filesystems).",
        json_schema_extra={"environment": True},
    )
    quarantine_files_max: int = Field(
        default=16,
        ge=0,
        le=4096,
        description="Files of each rank whose content is not what their name says that are kept "
        "in quarantine/, the newest; 0 deletes them.",
    )
    group_access: bool = Field(
        default=False,
        description="Lets the group read and write files and directories, for servers of "
        "several users that share a root; else they are for the user alone.",
        json_schema_extra={"environment": True},
    )
    unsafe_root: bool = Field(
        default=False,
        description="Accepts a root that belongs to someone else or can be written by everyone, "
        "who could then choose what a server answers.",
        json_schema_extra={"environment": True},
    )
    load_deadline_s: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="Seconds after which a load that has not ended is recomputed instead.",
        json_schema_extra={"environment": True},
    )
    pause_after_faults: int = Field(
        default=8,
        ge=0,
        description="Faults of the disk in a row (or one load's deadline with no transfer before "
        "it) after which it is left alone: loads and stores fail at once, and requests are "
        "computed. 0: never.",
    )
    pause_s: float = Field(
        default=1.0,
        gt=0,
        description="Seconds until the disk is tried again with one job; doubled each time it "
        "fails, up to pause_max_s.",
    )
    pause_max_s: float = Field(
        default=60.0,
        gt=0,
        description="The longest of these pauses: a disk that works again is used after this.",
    )
    shutdown_timeout_s: float = Field(
        default=10.0,
        ge=0,
        le=600,
        description="Seconds for which a stopping server finishes stores whose data it holds.",
    )
    flush_timeout_s: float = Field(
        default=5.0,
        gt=0,
        le=60,
        description="Seconds the engine waits at most for device copies of blocks it reuses.",
    )
    idle_wait_s: float = Field(
        default=0.005,
        ge=0,
        le=1,
        description="Seconds an engine step that has nothing to compute waits at most for a "
        "transfer to end (0: asks again at once). A new request waits no longer than this, and "
        "the processor is left to the transfer.",
    )
    mailbox_jobs: int = Field(
        default=4096,
        ge=1,
        description="Jobs handed to the reactor and not yet ended; beyond it a store is dropped "
        "and a load is recomputed, so that the queue cannot grow without bound.",
    )
    failed_key_ttl_s: float = Field(
        default=60.0,
        ge=0,
        description="Seconds for which a chunk that failed to load counts as a miss.",
    )
    lookup_ttl_s: float = Field(
        default=1.0,
        ge=0,
        description="Seconds for which a look-up that found a chunk is believed without asking "
        "the filesystem again; a chunk deleted meanwhile is recomputed.",
    )
    lookup_timeout_s: float = Field(
        default=0.25,
        gt=0,
        le=10,
        description="Seconds a look-up waits at most for the filesystem, during which the engine "
        "schedules nothing; then the chunk is a miss, as all are until the filesystem answers. Far "
        "above a network's round trip, and short beside a prefill.",
    )
    capacity: str = Field(
        default="",
        description="What the root may hold, all models and ranks together: bytes, '500GiB', or "
        "'50%' of its filesystem; empty: whatever free_space_min leaves. Of servers that share a "
        "root the one with the smallest decides.",
        json_schema_extra={"environment": True},
    )
    free_space_min: str = Field(
        default="10%",
        description="What is left free on the root's filesystem, whoever fills it; given like "
        "capacity. With less than this nothing is stored.",
        json_schema_extra={"environment": True},
    )
    capacity_high_watermark: float = Field(
        default=0.95,
        gt=0,
        le=1,
        description="Share of the limit above which chunks are evicted, early enough that stores "
        "need not wait for it.",
    )
    capacity_low_watermark: float = Field(
        default=0.9,
        gt=0,
        lt=1,
        description="Share of the limit down to which they are evicted, below the high one: the "
        "further, the less often the directory is read.",
    )
    eviction_policy: Literal["lru", "prefix", "none"] = Field(
        default="lru",
        description="Which chunks go first: the longest unused ('lru'), of a prefix the last ones; "
        "with 'prefix' the last ones of all prefixes of about the same age. 'none': this server "
        "evicts nothing, and stores nothing while the root is full.",
        json_schema_extra={"environment": True},
    )
    eviction_files_per_s: float = Field(
        default=500.0,
        gt=0,
        description="Files evicted per second at most: removing large files keeps a filesystem's "
        "journal busy, and 500 chunks of 5 MiB are more than a drive takes in.",
    )
    capacity_scan_interval_s: float = Field(
        default=300.0,
        ge=1,
        description="Seconds after which the root is counted again though its filesystem's free "
        "space shows no need; a count takes some 20 s for a million files, in the background.",
    )
    touch_interval_s: float = Field(
        default=60.0,
        ge=1,
        description="Times of use are told apart by so many seconds: a chunk's file gets a new "
        "one at most once in this time.",
    )
    trace_path: str = Field(
        default="",
        description="Directory into which each process writes a trace of its work for Perfetto; "
        "empty: none.",
        json_schema_extra={"environment": True},
    )
    trace_events_max: int = Field(
        default=1_000_000,
        ge=1,
        description="Events in the trace of one process, some 150 bytes each; what comes later "
        "is left out.",
    )
    switch_interval_s: float = Field(
        default=0.0005,
        ge=0,
        le=1,
        description="The interpreter's thread switch interval in the worker (0 leaves it): the "
        "reactor shares the interpreter with the engine, and 0.5 ms instead of 5 ms keeps the "
        "disk's queue filled while the engine computes in Python.",
    )

    @field_validator("root", mode="before")
    @classmethod
    def _absolute_root(cls, value: Any) -> Any:
        if isinstance(value, str | os.PathLike) and os.fspath(value):
            return Path(os.path.abspath(os.path.expanduser(os.fspath(value))))
        raise ValueError("must be the path of a directory")

    @field_validator("capacity", "free_space_min", mode="before")
    @classmethod
    def _size(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ValueError(f"must be {ACCEPTED}")
        text = str(value).strip()
        if info.field_name == "capacity" and not text:
            return text
        size = parse_size(text)
        if info.field_name == "capacity" and not (size.amount or size.share):
            raise ValueError(f"must be above 0: {ACCEPTED}")
        return text

    @model_validator(mode="after")
    def _watermarks(self) -> Self:
        if self.capacity_low_watermark >= self.capacity_high_watermark:
            raise ValueError(
                f"option 'capacity_low_watermark' is {self.capacity_low_watermark}: must be below "
                f"'capacity_high_watermark', which is {self.capacity_high_watermark}"
            )
        return self

    @field_validator("*", mode="before")
    @classmethod
    def _number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false where a number is meant; they would count as 1 and 0."""
        numeric = cls.model_fields[info.field_name or ""].annotation in (int, float)
        if numeric and isinstance(value, bool):
            raise ValueError("must be a number")
        return value

    @property
    def slots_min(self) -> int:
        """Slots without which the disk's queue cannot be kept full (paper, section 6.4)."""
        return self.io_depth + self.copy_headroom


def environment_options(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The options that the environment sets: ``{option: text}``."""
    found = {}
    for name, field in Config.model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("environment"):
            text = environment.get(ENVIRONMENT_PREFIX + name.upper())
            if text:
                found[name] = text
    return found


def parse_config(options: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Config:
    """Build the configuration from ``kv_connector_extra_config``.

    Args:
        options: the user's options, with or without vLLM's own connector keys.
        environment: where ``PYKVCACHE_*`` variables are looked up.

    Raises:
        ConfigError: an unknown option, a value of the wrong type or range, or an
            impossible combination; the message names option, value and what is accepted.
    """
    own = {key: value for key, value in options.items() if key not in CONNECTOR_KEYS}
    for key in own:
        if key in REPLACED_KEYS:
            raise ConfigError(replaced_option(key))
        if key not in Config.model_fields:
            raise ConfigError(unknown_option(key, Config.model_fields))
    from_environment = environment_options(environment)
    try:
        return Config(**{"root": default_root(environment), **from_environment, **own})
    except ValidationError as error:
        origins = {
            name: f" (from {ENVIRONMENT_PREFIX}{name.upper()})"
            for name in from_environment.keys() - own.keys()
        }
        raise ConfigError(describe_errors(error, origins)) from None
