# SPDX-License-Identifier: Apache-2.0
"""A server's API for its KV files, under ``/v1/pykvcache``: an endpoint plugin of vLLM.

vLLM loads it only where ``VLLM_PLUGINS`` names it, and it adds its routes only where not everybody
may call them: in vLLM's development mode, as ``/reset_prefix_cache``, or with an API key, which
vLLM asks for below ``/v1`` but not everywhere.

Files and pins are read and changed here, in the API server's process, with the functions of the
commands; the engine is only asked which files are its own and what its pool holds. A filesystem
may be slow, or hang, so the event loop calls none.
"""

from __future__ import annotations

import asyncio
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, model_validator
from starlette.datastructures import State
from vllm.logger import init_logger

from pykvcache import contents
from pykvcache.config import Config
from pykvcache.errors import ConfigError
from pykvcache.prompts import Group, cached_tokens, groups_of_tokens, key_facts, leading_tokens
from vllm import envs
from vllm.v1.kv_offload.pykvcache.backend import SETTINGS_KEY
from vllm.v1.kv_offload.pykvcache.control_worker import EXTENSION, PLUGIN_NAME

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

logger = init_logger(__name__)

PREFIX = "/v1/pykvcache"

CALLS_MAX = 8
"""Calls of the filesystem at once: each has a thread, which one that hangs keeps for ever."""

WAIT_S = 60.0
"""Seconds for an answer of the engine, which gives it between two steps, or of the filesystem
about one prompt."""

KEYS_MAX = 65_536
"""Keys in one request: those of 16 million tokens."""

Prompt = str | list[NonNegativeInt]
Result = TypeVar("Result")


class PromptBody(BaseModel):
    """A prompt as the completions API takes it: text, or its tokens."""

    model_config = ConfigDict(extra="forbid")

    prompt: Prompt = Field(min_length=1)


class ChunksBody(BaseModel):
    """Which chunks are meant: those of a prompt, or those with these keys (hex)."""

    model_config = ConfigDict(extra="forbid")

    prompt: Prompt | None = Field(default=None, min_length=1)
    keys: list[str] | None = Field(default=None, min_length=1, max_length=KEYS_MAX)

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.prompt is None) == (self.keys is None):
            raise ValueError("give either 'prompt' or 'keys'")
        return self


class ControlPlugin:
    """What an entry point in vLLM's group ``vllm.endpoint_plugins`` makes."""

    name = PLUGIN_NAME
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, unless everybody could call them."""
        keys = app.state.args.api_key or [envs.VLLM_API_KEY]
        if envs.VLLM_SERVER_DEV_MODE or any(keys):
            app.include_router(router)
        else:
            logger.warning(
                "%s is off: it needs an API key (--api-key) or VLLM_SERVER_DEV_MODE=1", PREFIX
            )

    async def init_state(
        self, engine_client: EngineClient | None, state: State, args: Namespace
    ) -> None:
        """Remember the engine, if it uses this backend."""
        transfer = engine_client.vllm_config.kv_transfer_config if engine_client else None
        extra = transfer.kv_connector_extra_config if transfer else {}
        state.pykvcache = None
        if engine_client is not None and SETTINGS_KEY in extra:
            config = Config(**extra[SETTINGS_KEY]["config"])
            state.pykvcache = Control(engine_client, config)


@dataclass(frozen=True, slots=True)
class EngineState:
    """What all ranks' workers say.

    Attributes:
        identity: the directory of the server's files.
        dram_chunks: in each rank's pool.
        in_dram: whether every rank's pool holds each of the chunks that were asked for.
    """

    identity: Path
    dram_chunks: list[int]
    in_dram: list[bool]


class Control:
    """What the routes do, for one engine."""

    def __init__(self, engine: EngineClient, config: Config, wait_s: float = WAIT_S) -> None:
        """Args:
        engine: uses this backend.
        config: its options.
        wait_s: for an answer of the engine, or of the filesystem about one prompt.
        """
        self._engine = engine
        self.config = config
        self._wait_s = wait_s
        self._identity: Path | None = None
        self._calls = 0

    async def identity(self) -> Path:
        """The directory of the engine's files."""
        if self._identity is None:
            self._identity = (await self.ask_engine()).identity
        return self._identity

    async def ask_engine(self, keys: Sequence[str] = ()) -> EngineState:
        """Which files are the engine's, and which of the keys (hex) its ranks' pools hold.

        Raises:
            HTTPException: it cannot be asked, or does not answer.
        """
        if self._engine.vllm_config.parallel_config.worker_extension_cls != EXTENSION:
            raise HTTPException(
                HTTPStatus.NOT_IMPLEMENTED,
                "--worker-extension-cls is in use for something else: leave it out",
            )
        asked = self._engine.collective_rpc("pykvcache_state", args=(list(keys),))
        try:
            ranks: list[dict[str, Any]] = await asyncio.wait_for(asked, self._wait_s)
        except TimeoutError:
            raise _unavailable(f"the engine has not answered within {self._wait_s:.0f} s") from None
        return EngineState(
            Path(ranks[0]["directory"]),
            [rank["chunks"] for rank in ranks],
            [all(held) for held in zip(*(rank["held"] for rank in ranks), strict=True)],
        )

    async def tokens_of(self, prompt: str | list[int]) -> list[int]:
        """The prompt's tokens, as vLLM makes them of a completion's prompt."""
        if not isinstance(prompt, str):
            return prompt
        renderer = self._engine.renderer
        rendered: Any = await renderer.tokenize_prompt_async(
            {"prompt": prompt}, renderer.default_cmpl_tok_params
        )
        return list(rendered["prompt_token_ids"])

    async def groups_of(self, identity: Path, tokens: list[int]) -> list[Group]:
        """The prompt's chunks."""
        return await self.call(lambda: groups_of_tokens(key_facts(identity), tokens))

    async def keys_of(self, body: ChunksBody, identity: Path) -> list[str]:
        """The keys (hex) that are meant."""
        if body.prompt is None:
            with _refusals():
                return [contents.check_key(key) for key in body.keys or ()]
        groups = await self.groups_of(identity, await self.tokens_of(body.prompt))
        return [key for group in groups for key in group.keys]

    async def call(self, work: Callable[[], Result], *, is_long: bool = False) -> Result:
        """Do something with files on a thread of its own; not one of a pool, for which the
        server's end would wait while the filesystem hangs.

        Args:
            work: what to do.
            is_long: whether it may take as long as it wants.

        Raises:
            HTTPException: too many are waiting already, it takes too long, or it fails.
        """
        if self._calls >= CALLS_MAX:
            raise _unavailable(f"{CALLS_MAX} other calls wait for the root '{self.config.root}'")
        self._calls += 1
        done: Future[Result] = Future()
        waiting = asyncio.wrap_future(done)
        waiting.add_done_callback(self._end_call)
        threading.Thread(
            target=_settle, args=(done, work), name="pykvcache-control", daemon=True
        ).start()
        # Not wait_for: its TimeoutError could be the filesystem's own (ETIMEDOUT).
        await asyncio.wait({waiting}, timeout=None if is_long else self._wait_s)
        if not waiting.done():
            raise _unavailable(
                f"the root '{self.config.root}' has not answered within {self._wait_s:.0f} s"
            )
        with _refusals():
            return waiting.result()

    def _end_call(self, waiting: asyncio.Future[Any]) -> None:
        self._calls -= 1
        waiting.exception()  # nobody may be there any more to hear of it


def _settle(done: Future[Result], work: Callable[[], Result]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)


def _unavailable(message: str) -> HTTPException:
    return HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, message)


@contextmanager
def _refusals() -> Iterator[None]:
    """What the commands say to whoever called them, as an answer."""
    try:
        yield
    except ConfigError as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from None
    except OSError as error:
        raise _unavailable(f"the root cannot be used: {error.strerror}") from None


def _complain(path: str, error: OSError) -> None:
    logger.warning("KV offloading: '%s': %s", path, error.strerror)


def control_of(request: Request) -> Control:
    """Of the server.

    Raises:
        HTTPException: it does not use this backend.
    """
    control: Control | None = request.app.state.pykvcache
    if control is None:
        raise HTTPException(
            HTTPStatus.NOT_FOUND, "this server runs without --kv-offloading-backend pykvcache"
        )
    return control


ControlOfServer = Annotated[Control, Depends(control_of)]

router = APIRouter(prefix=PREFIX, tags=["pykvcache"])


@router.post("/lookup")
async def look_up(body: PromptBody, control: ControlOfServer) -> dict[str, Any]:
    """How much of a prompt is in files, and how much of that in the pools as well."""
    tokens = await control.tokens_of(body.prompt)
    identity = await control.identity()
    groups = await control.groups_of(identity, tokens)
    on_disk = await control.call(lambda: cached_tokens(identity, groups))
    keys = [key for group in groups for key in group.keys]
    state = await control.ask_engine(keys)
    held = {key for key, is_held in zip(keys, state.in_dram, strict=True) if is_held}
    return {
        "identity": identity.name,
        "prompt_tokens": len(tokens),
        # A chunk without a file is a miss, whatever the pools hold.
        "cached_tokens": {
            "disk": on_disk,
            "dram": min(on_disk, leading_tokens(groups, held.__contains__)),
        },
        "keys": [list(group.keys) for group in groups],
    }


@router.post("/pin")
async def pin(body: ChunksBody, control: ControlOfServer) -> dict[str, Any]:
    """Keep chunks that are in files from eviction."""
    identity = await control.identity()
    keys = await control.keys_of(body, identity)
    kept = await control.call(lambda: contents.pin(identity, keys))
    return _pins(identity, kept, "none of these chunks is in a file", is_pinned=True)


@router.post("/unpin")
async def unpin(body: ChunksBody, control: ControlOfServer) -> dict[str, Any]:
    """Let chunks be evicted again."""
    identity = await control.identity()
    keys = await control.keys_of(body, identity)
    freed = await control.call(lambda: contents.unpin(identity, keys))
    return _pins(identity, freed, "none of these chunks is pinned", is_pinned=False)


def _pins(identity: Path, keys: list[str], refusal: str, *, is_pinned: bool) -> dict[str, Any]:
    if not keys:
        raise HTTPException(HTTPStatus.NOT_FOUND, refusal)
    return {"identity": identity.name, "keys": keys, "pinned": is_pinned}


@router.post("/clear")
async def clear(control: ControlOfServer) -> dict[str, Any]:
    """Remove all chunks of this server's model and settings, pinned ones too."""
    identity = await control.identity()
    logger.info("KV offloading: removing all chunks of '%s'", identity)
    removed = await control.call(
        lambda: contents.remove_all([identity], _complain, _complain), is_long=True
    )
    return {
        "identity": identity.name,
        "removed_files": removed.files,
        "removed_bytes": removed.size,
        "failed_files": removed.failed,
    }


@router.get("/stats")
async def stats(control: ControlOfServer) -> dict[str, Any]:
    """Count what is there of this server's model and settings, in files and in the pools."""
    state = await control.ask_engine()
    found = await control.call(
        lambda: contents.count(
            control.config, [state.identity], time.time(), _complain, is_whole=False
        ),
        is_long=True,
    )
    return {**found.document(), "dram_chunks": state.dram_chunks}
