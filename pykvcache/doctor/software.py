# SPDX-License-Identifier: Apache-2.0
"""The installed vLLM, without importing it: that takes seconds and may fail for other reasons."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from pykvcache.doctor.findings import Finding, fail, ok

_PATCHED = re.compile(r"(?:\+|\.)pykvcache\.\d+")
OVERLAY = "v1/kv_offload/pykvcache/spec.py"
HOOK = "v1/kv_offload/factory.py"
"""A file of upstream's that a patch makes name the overlay's spec."""

_INSTALL = "install this distribution of vLLM, over the one that is there: see the README"


def check_software() -> Iterator[Finding]:
    """Every finding about what is installed."""
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        yield fail("vllm", "not installed", _INSTALL)
        return
    spec = importlib.util.find_spec("vllm")
    places = list(spec.submodule_search_locations or ()) if spec else []
    yield vllm_finding(version, Path(places[0]) if places else None)


def vllm_finding(version: str, package: Path | None) -> Finding:
    """Whether an installed vLLM is this distribution, and whole.

    Args:
        version: of its metadata.
        package: its directory.
    """
    if not _PATCHED.search(version):
        return fail("vllm", f"{version} has no pykvcache backend", _INSTALL)
    if package is None or not (package / OVERLAY).is_file():
        return fail("vllm", f"{version}, but '{OVERLAY}' is missing", _INSTALL)
    hook = package / HOOK
    if not hook.is_file() or "PyKVCacheSpec" not in hook.read_text():
        return fail("vllm", f"{version}, but '{HOOK}' is not patched", _INSTALL)
    return ok("vllm", f"{version}, with its patches")
