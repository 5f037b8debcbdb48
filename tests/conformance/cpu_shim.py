# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that lets vLLM's own tests of its CPU offloading worker run without a GPU.

    pytest -p cpu_shim tests/v1/kv_offload

`vllm.v1.kv_offload.cpu.gpu_worker` copies between GPU and host memory on CUDA streams, and its
tests run on whatever device the platform has. On a machine without a GPU both sides are host
memory, so three things that the module looks up by name are replaced, in that module alone: the
platform's streams and torch's events, which have nothing to order when copies are synchronous,
and the copy itself. Everything else that is tested (descriptors, layouts, regions, accounting)
stays vLLM's. Nothing is replaced where there is a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from typing import Any

import pytest
import torch


class Stream:
    """A stream on which everything has always happened already."""

    def wait_stream(self, other: Stream) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Event) -> None:
        """Nothing to wait for."""


class Event:
    """An event that is complete as soon as it is recorded, and remembers when that was."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._recorded_s = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._recorded_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between the two records, as torch counts them."""
        return (end._recorded_s - self._recorded_s) * 1e3


class Instead:
    """An object with some attributes replaced; all others are the original's."""

    def __init__(self, original: Any, **replaced: Any) -> None:
        self._original = original
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class DeviceTensor(torch.Tensor):
    """Host memory that answers for GPU memory."""

    is_cuda = True


def copy_batch(
    sources: torch.Tensor,
    destinations: torch.Tensor,
    sizes: torch.Tensor,
    is_src_access_order_any: bool = False,
) -> None:
    """Copy `sizes[i]` bytes from address `sources[i]` to address `destinations[i]`."""
    for source, destination, size in zip(
        sources.tolist(), destinations.tolist(), sizes.tolist(), strict=True
    ):
        ctypes.memmove(destination, source, size)


def replace_device_side(module: Any) -> None:
    """Replace, in vLLM's `gpu_worker` module, what needs a device."""
    module.current_platform = Instead(
        module.current_platform,
        Stream=Stream,
        current_stream=Stream,
        stream=lambda stream: contextlib.nullcontext(),
    )
    module.torch = Instead(module.torch, Event=Event)
    module._select_swap_blocks_fn = lambda *args, **kwargs: copy_batch
    handler = module.SingleDirectionOffloadingHandler
    construct = handler.__init__

    def construct_with_device_tensors(
        self: Any, gpu_tensors: list[torch.Tensor], *args: Any, **kwargs: Any
    ) -> None:
        tensors = [tensor.as_subclass(DeviceTensor) for tensor in gpu_tensors]
        construct(self, tensors, *args, **kwargs)

    handler.__init__ = construct_with_device_tensors


def pytest_configure(config: pytest.Config) -> None:
    """Called by pytest before it imports any test."""
    if not torch.cuda.is_available():
        from vllm.v1.kv_offload.cpu import gpu_worker

        replace_device_side(gpu_worker)
