# SPDX-License-Identifier: Apache-2.0
"""Real engines on this backend, each in a process of its own, driven over a pipe.

Importing vLLM takes some 15 s, starting a tiny model 3 s. So engines are forked from a process
that has imported vLLM and nothing else: a fork server, which ends with the test run. The engine
core and the worker run in the engine's process too; with several ranks the workers are processes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ANSWER_TOKENS = 8
REPLY_DEADLINE_S = 240.0
"""A start takes 3 s on two cores, with two ranks 40 s; a loaded machine gets several times that."""
STOP_DEADLINE_S = 60.0
LOG_TAIL_BYTES = 6000

KV_CACHE_GIB = 1
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise a NUMA node for each rank
}
_THREADS = {"OMP_NUM_THREADS": "1"}
"""These models are so small that a second thread only waits."""

_PRELOADED = ["vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"]


class EngineError(RuntimeError):
    """The engine refused to start or failed; the message is the engine's."""


@dataclass(frozen=True)
class Answer:
    """What a prompt got: greedy tokens, the logprob of each, and how many tokens of the prompt
    were found, in memory or on disk."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int


@dataclass(frozen=True)
class Group:
    """A KV cache group as vLLM made it."""

    kind: str
    tokens_per_block: int
    layers: int


class Engine:
    """The engine of one model, from `with` to its end."""

    def __init__(self, log: Path, **arguments: Any) -> None:
        """Args:
        log: where everything it writes goes.
        arguments: of `vllm.LLM`.
        """
        self._log = log
        self._arguments = arguments

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, self._log, self._arguments), name=self._log.stem
        )
        with _environment(_THREADS):  # read when the fork server starts and imports PyTorch
            self._process.start()
        theirs.close()
        try:
            self._reply()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._end()

    def ask(self, prompts: Sequence[Sequence[int]], *, together: bool = False) -> list[Answer]:
        """Answer prompts one after the other, or all in one batch."""
        return self._call("ask", [list(prompt) for prompt in prompts], together)

    def settle(self) -> None:
        """Return when no transfer is in flight."""
        self._call("settle")

    def forget(self) -> None:
        """Empty vLLM's in-memory prefix cache; what comes later comes from disk or is computed."""
        self._call("forget")

    def counters(self) -> dict[str, float]:
        """This backend's counters, as `name{label=value,...}` without those that are 0."""
        return self._call("counters")

    def groups(self) -> list[Group]:
        """The KV cache groups."""
        return self._call("groups")

    def _call(self, name: str, *arguments: Any) -> Any:
        self._pipe.send((name, arguments))
        return self._reply()

    def _reply(self) -> Any:
        try:
            if not self._pipe.poll(REPLY_DEADLINE_S):
                raise EngineError(f"no reply within {REPLY_DEADLINE_S:.0f} s\n{self._tail()}")
            failed, value = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise EngineError(f"the engine's process ended\n{self._tail()}") from None
        if failed:
            raise EngineError(value)
        return value

    def _end(self) -> None:
        self._process.join(STOP_DEADLINE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()
        self._pipe.close()

    def _tail(self) -> str:
        with contextlib.suppress(OSError):
            return self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        return "(no log)"


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Any:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(pipe: Connection, log: Path, arguments: dict[str, Any]) -> None:
    """The engine's process."""
    with log.open("wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(ENVIRONMENT)
    try:
        served = _Served(arguments)
    except Exception as error:
        traceback.print_exc()
        pipe.send((True, f"{type(error).__name__}: {error}"))
        return
    pipe.send((False, None))
    while (request := pipe.recv()) is not None:
        name, parameters = request
        try:
            pipe.send((False, getattr(served, name)(*parameters)))
        except Exception as error:
            traceback.print_exc()
            pipe.send((True, f"{type(error).__name__}: {error}"))
    served.stop()
    sys.stdout.flush()


class _Served:
    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm.model_executor.models import registry
        from vllm.v1.executor import multiproc_executor

        from vllm import LLM

        # vLLM looks at a model's class in another process, to keep CUDA out of this one.
        registry._run_in_subprocess = _run_here
        # The CPU platform insists on workers that import everything again.
        multiproc_executor.get_mp_context = _fork
        if arguments.pop("prefix_caching_forced", False):
            _force_prefix_caching()
        self._llm = LLM(
            skip_tokenizer_init=True,
            enforce_eager=True,
            disable_log_stats=False,
            kv_offloading_backend="pykvcache",
            **arguments,
        )
        self._engine = self._llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler

    def ask(self, prompts: list[list[int]], together: bool) -> list[Answer]:
        from vllm import SamplingParams

        parameters = SamplingParams(
            max_tokens=ANSWER_TOKENS, temperature=0, logprobs=0, detokenize=False, ignore_eos=True
        )
        batches = [prompts] if together else [[prompt] for prompt in prompts]
        answers = []
        for batch in batches:
            for output in self._llm.generate(
                [{"prompt_token_ids": prompt} for prompt in batch], parameters, use_tqdm=False
            ):
                tokens, found = output.outputs[0].token_ids, output.outputs[0].logprobs
                answers.append(
                    Answer(
                        tuple(tokens),
                        tuple(
                            each[token].logprob for token, each in zip(tokens, found, strict=True)
                        ),
                        output.num_cached_tokens,
                    )
                )
        return answers

    def settle(self) -> None:
        while self._scheduler.connector.has_pending_push_work():
            self._engine.step()

    def forget(self) -> None:
        self.settle()
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache")

    def counters(self) -> dict[str, float]:
        self.settle()
        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            value = getattr(metric, "value", 0)
            if metric.name.startswith("vllm:kv_offload_") and value:
                labels = {
                    name: label
                    for name, label in metric.labels.items()
                    if name not in ("model_name", "engine", "rank")
                }
                text = ",".join(f"{name}={label}" for name, label in sorted(labels.items()))
                name = metric.name.removeprefix("vllm:kv_offload_")
                name = f"{name}{{{text}}}" if text else name
                found[name] = found.get(name, 0) + value
        return found

    def groups(self) -> list[Group]:
        return [
            Group(
                type(group.kv_cache_spec).__name__,
                group.kv_cache_spec.block_size,
                len(group.layer_names),
            )
            for group in self._scheduler.kv_cache_config.kv_cache_groups
        ]

    def stop(self) -> None:
        self._engine.engine_core.shutdown()


def _run_here(function: Callable[[], Any]) -> Any:
    return function()


def _fork() -> Any:
    return multiprocessing.get_context("fork")


def _force_prefix_caching() -> None:
    """Have vLLM reuse KV also where it knows better, to see what our files hold there."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def forced(cls: type[CpuPlatform], vllm_config: Any) -> None:
        check(cls, vllm_config)
        vllm_config.cache_config.enable_prefix_caching = True

    CpuPlatform.check_and_update_config = classmethod(forced)
