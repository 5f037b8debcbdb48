# SPDX-License-Identifier: Apache-2.0
"""A vLLM plugin that lets vLLM's CPU tier run without a GPU; see `tests/e2e/sites.py`.

Runs inside the server under test, from a copy outside the repository, beside a copy of
`tests/conformance/cpu_shim.py`.
"""

from __future__ import annotations


def register() -> None:
    """Entry point, called in every process of the server."""
    from cpu_shim import Instead, replace_device_side  # type: ignore[import-not-found]
    from vllm.v1.kv_offload.cpu import gpu_worker, spec

    if isinstance(spec.current_platform, Instead):
        return
    replace_device_side(gpu_worker)
    # The worker is refused without a GPU; the module asks for nothing else.
    spec.current_platform = Instead(spec.current_platform, is_cuda_alike=lambda: True)
