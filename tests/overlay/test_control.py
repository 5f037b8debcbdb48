# SPDX-License-Identifier: Apache-2.0
"""The routes of the API, with an engine that is played."""

from __future__ import annotations

import asyncio
import json
import threading
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm.v1.kv_offload.pykvcache.control", reason="needs the patched vLLM")

from fastapi import FastAPI, HTTPException
from fastapi.testclient import TestClient
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.plugins.endpoint_plugins.interface import EndpointPlugin

from pykvcache import contents
from pykvcache.capacity.pins import Pins
from pykvcache.config import Config
from pykvcache.identity import FILE_NAME
from pykvcache.layout import ChunkPaths, rank_directory
from pykvcache.prompts import groups_of_tokens, key_facts
from vllm.v1.kv_offload.pykvcache import control
from vllm.v1.kv_offload.pykvcache.backend import SETTINGS_KEY
from vllm.v1.kv_offload.pykvcache.control_worker import EXTENSION, extend_worker

FACTS = {
    "model": "a model",
    "hash_algorithm": "sha256",
    "hash_seed": "7",
    "tokens_per_hash": 4,
    "blocks_per_chunk": 2,
    "tokens_per_block": [4],
}
TOKENS = list(range(100, 137))
"""Four chunks of eight tokens, and five tokens."""

FILE_BYTES = 1000


class Renderer:
    default_cmpl_tok_params = object()

    async def tokenize_prompt_async(self, prompt: dict[str, str], params: object) -> dict[str, Any]:
        assert params is self.default_cmpl_tok_params
        return {"prompt_token_ids": [int(word) for word in prompt["prompt"].split()]}


class Engine:
    """Of two ranks, whose files are in a real directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.identity = root / "a-model-0123456789abcdef"
        self.ranks = [rank_directory(self.identity, rank) for rank in (0, 1)]
        for rank in self.ranks:
            rank.mkdir(parents=True)
        (self.identity / FILE_NAME).write_text(json.dumps(FACTS))
        (group,) = groups_of_tokens(key_facts(self.identity), TOKENS)
        self.keys = group.keys
        self.pools: list[set[str]] = [set(), set()]
        self.renderer = Renderer()
        self.answers = True
        settings = {"config": Config(root=root, free_space_min="0").model_dump(mode="json")}
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(worker_extension_cls=EXTENSION),
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config={SETTINGS_KEY: settings}),
        )

    def store(self, chunks: int) -> None:
        """Publish the first so many chunks of the prompt, on both ranks."""
        for key in self.keys[:chunks]:
            for rank in (0, 1):
                path = self.file(key, rank)
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(bytes(FILE_BYTES))

    def file(self, key: str, rank: int) -> Path:
        return Path(ChunkPaths(self.ranks[rank]).final(bytes.fromhex(key)))

    async def collective_rpc(self, method: str, args: tuple[Sequence[str]]) -> list[dict[str, Any]]:
        assert method == "pykvcache_state"
        if not self.answers:
            await asyncio.Event().wait()
        return [
            {
                "directory": str(self.identity),
                "chunks": len(pool),
                "held": [key in pool for key in args[0]],
            }
            for pool in self.pools
        ]


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path)


def application(engine: Any, api_key: str | None = None) -> FastAPI:
    """As vLLM's build_app and init_app_state put it together."""
    app = FastAPI()
    app.state.args = Namespace(api_key=[api_key] if api_key else None, log_error_stack=False)
    plugin = control.ControlPlugin()
    assert isinstance(plugin, EndpointPlugin)
    plugin.attach_router(app)
    init_exception_handler(app)
    if api_key:
        app.add_middleware(AuthenticationMiddleware, tokens=[api_key])
    asyncio.run(plugin.init_state(engine, app.state, app.state.args))
    return app


@pytest.fixture
def client(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    with TestClient(application(engine)) as client:
        yield client


def post(client: TestClient, route: str, **body: Any) -> Any:
    reply = client.post(f"{control.PREFIX}/{route}", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def refusal(reply: httpx.Response, status: int) -> str:
    """The message of a refusal in vLLM's own form."""
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error["code"] == status
    return str(error["message"])


# --- who may call


ROUTES = [
    ("POST", "lookup"),
    ("POST", "pin"),
    ("POST", "unpin"),
    ("POST", "clear"),
    ("GET", "stats"),
]


@pytest.mark.parametrize(("method", "route"), ROUTES)
def test_there_is_nothing_where_everybody_could_call_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, method: str, route: str
) -> None:
    monkeypatch.delenv("VLLM_SERVER_DEV_MODE", raising=False)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    engine.store(1)
    with TestClient(application(engine)) as client:
        assert client.request(method, f"{control.PREFIX}/{route}").status_code == 404
    assert engine.file(engine.keys[0], 0).exists()


@pytest.mark.parametrize(("method", "route"), ROUTES)
def test_an_api_key_is_asked_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, method: str, route: str
) -> None:
    monkeypatch.delenv("VLLM_SERVER_DEV_MODE", raising=False)
    with TestClient(application(engine, api_key="secret")) as client:
        assert client.request(method, f"{control.PREFIX}/{route}").status_code == 401
        allowed = {"Authorization": "Bearer secret"}
        reply = client.get(f"{control.PREFIX}/stats", headers=allowed)
        assert reply.status_code == 200


def test_another_backend_has_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    other = SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=None))
    for engine in (other, None):
        with TestClient(application(engine)) as client:
            reply = client.get(f"{control.PREFIX}/stats")
            assert "--kv-offloading-backend pykvcache" in refusal(reply, 404)


@pytest.mark.parametrize(
    ("plugins", "given", "ordered"),
    [
        ("pykvcache", "", EXTENSION),
        ("other,pykvcache", "", EXTENSION),
        ("other", "", ""),
        (None, "", ""),
        ("pykvcache", "a.user.Extension", "a.user.Extension"),
    ],
)
def test_the_worker_is_extended_only_for_the_api(
    monkeypatch: pytest.MonkeyPatch, plugins: str | None, given: str, ordered: str
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(worker_extension_cls=given))
    extend_worker(config)
    assert config.parallel_config.worker_extension_cls == ordered


def test_a_foreign_extension_of_the_worker_is_said(client: TestClient, engine: Engine) -> None:
    engine.vllm_config.parallel_config.worker_extension_cls = "a.user.Extension"
    reply = client.get(f"{control.PREFIX}/stats")
    assert "--worker-extension-cls" in refusal(reply, 501)


# --- what it does


@pytest.mark.parametrize("prompt", [TOKENS, " ".join(map(str, TOKENS))], ids=["tokens", "text"])
def test_look_up_tells_tiers(client: TestClient, engine: Engine, prompt: str | list[int]) -> None:
    empty = post(client, "lookup", prompt=prompt)
    assert empty["cached_tokens"] == {"disk": 0, "dram": 0}
    engine.store(3)
    engine.pools[0].update(engine.keys)
    engine.pools[1].update(engine.keys[:2])
    found = post(client, "lookup", prompt=prompt)
    assert found == {
        "identity": engine.identity.name,
        "prompt_tokens": len(TOKENS),
        "cached_tokens": {"disk": 24, "dram": 16},
        "keys": [list(engine.keys)],
    }


def test_what_has_no_file_is_not_cached(client: TestClient, engine: Engine) -> None:
    engine.store(2)
    engine.file(engine.keys[1], 1).unlink()
    for pool in engine.pools:
        pool.update(engine.keys)
    assert post(client, "lookup", prompt=TOKENS)["cached_tokens"] == {"disk": 8, "dram": 8}


@pytest.mark.parametrize("by_key", [False, True])
def test_pins_come_and_go(client: TestClient, engine: Engine, by_key: bool) -> None:
    engine.store(2)
    stored = list(engine.keys[:2])
    body: dict[str, Any] = {"keys": stored} if by_key else {"prompt": TOKENS}
    told = {"identity": engine.identity.name, "keys": stored}
    assert post(client, "pin", **body) == {**told, "pinned": True}
    assert Pins(engine.identity).keys() == set(stored)
    assert post(client, "unpin", **body) == {**told, "pinned": False}
    assert Pins(engine.identity).keys() == set()
    reply = client.post(f"{control.PREFIX}/unpin", json=body)
    assert "none of these chunks is pinned" in refusal(reply, 404)


def test_what_is_not_there_is_not_pinned(client: TestClient, engine: Engine) -> None:
    reply = client.post(f"{control.PREFIX}/pin", json={"prompt": TOKENS})
    assert "none of these chunks is in a file" in refusal(reply, 404)
    assert Pins(engine.identity).keys() == set()


def test_clear_removes_what_is_this_servers(client: TestClient, engine: Engine) -> None:
    engine.store(3)
    Pins(engine.identity).add(engine.keys[0])
    other = engine.root / "other-0123456789abcdef"
    (other / "rank-0000" / "abc").mkdir(parents=True)
    (other / FILE_NAME).write_text("{}")
    theirs = other / "rank-0000" / "abc" / "abcd.kv"
    theirs.write_bytes(b"x")
    assert post(client, "clear") == {
        "identity": engine.identity.name,
        "removed_files": 6,
        "removed_bytes": 6 * FILE_BYTES,
        "failed_files": 0,
    }
    assert theirs.exists() and not list(engine.identity.rglob("*.kv"))
    assert Pins(engine.identity).keys() == set()


def test_stats_count_files_and_pools(client: TestClient, engine: Engine) -> None:
    engine.store(3)
    engine.pools[1].update(engine.keys[:2])
    Pins(engine.identity).add(engine.keys[0])
    found = client.get(f"{control.PREFIX}/stats").json()
    assert (found["files"], found["bytes"], found["dram_chunks"]) == (6, 6 * FILE_BYTES, [0, 2])
    (mine,) = found["identities"]
    assert (mine["model"], mine["ranks"]) == ("a model", [0, 1])
    assert mine["pinned_bytes"] == 2 * FILE_BYTES
    assert found["limit_bytes"] > 0


# --- bad input, and what does not answer


@pytest.mark.parametrize(
    ("route", "body", "what"),
    [
        ("lookup", {}, "prompt"),
        ("lookup", {"prompt": ""}, "prompt"),
        ("lookup", {"prompt": []}, "prompt"),
        ("lookup", {"prompt": [-1]}, "prompt"),
        ("lookup", {"prompt": {"a": 1}}, "prompt"),
        ("lookup", {"prompt": [1], "rank": 0}, "rank"),
        ("pin", {}, "either 'prompt' or 'keys'"),
        ("pin", {"prompt": [1], "keys": ["ab"]}, "either 'prompt' or 'keys'"),
        ("pin", {"keys": []}, "keys"),
        ("pin", {"keys": ["../../etc"]}, "must be the hex digits"),
        ("unpin", {"keys": ["xyz"]}, "must be the hex digits"),
        ("unpin", {"keys": ["ab" * 65]}, "must be the hex digits"),
    ],
)
def test_bad_input_is_named(
    client: TestClient, engine: Engine, route: str, body: dict[str, Any], what: str
) -> None:
    engine.store(1)
    reply = client.post(f"{control.PREFIX}/{route}", json=body)
    assert what in refusal(reply, 400)


def test_what_is_no_json_is_refused(client: TestClient) -> None:
    reply = client.post(f"{control.PREFIX}/lookup", content=b"{")
    assert reply.status_code == 400


def test_a_seed_at_random_is_said(client: TestClient, engine: Engine) -> None:
    facts = {**FACTS, "hash_seed": "random 12ab"}
    (engine.identity / FILE_NAME).write_text(json.dumps(facts))
    reply = client.post(f"{control.PREFIX}/lookup", json={"prompt": TOKENS})
    assert "chosen at random" in refusal(reply, 400)


def test_a_root_that_cannot_be_written_is_said(
    client: TestClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(contents, "pin", refuse)
    reply = client.post(f"{control.PREFIX}/pin", json={"prompt": TOKENS})
    assert "Read-only file system" in refusal(reply, 503)


def test_an_engine_that_does_not_answer_is_said(engine: Engine) -> None:
    engine.answers = False
    api = control.Control(engine, Config(root=engine.root), wait_s=0.0)  # type: ignore[arg-type]
    with pytest.raises(HTTPException, match="engine has not answered") as refused:
        asyncio.run(api.ask_engine())
    assert refused.value.status_code == 503


def test_a_root_that_hangs_takes_so_many_threads(engine: Engine) -> None:
    released = threading.Event()

    async def play() -> None:
        api = control.Control(engine, Config(root=engine.root), wait_s=0.0)  # type: ignore[arg-type]
        for _ in range(control.CALLS_MAX):
            with pytest.raises(HTTPException, match="has not answered within"):
                await api.call(released.wait)
        with pytest.raises(HTTPException, match="other calls wait for the root"):
            await api.call(released.wait)
        hung = [thread for thread in threading.enumerate() if thread.name == "pykvcache-control"]
        assert len(hung) == control.CALLS_MAX and all(thread.daemon for thread in hung)
        released.set()
        for thread in hung:
            await asyncio.get_running_loop().run_in_executor(None, thread.join)
        assert await api.call(lambda: "it works again", is_long=True) == "it works again"

    asyncio.run(play())


def test_a_root_that_hangs_holds_up_no_other_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    app = application(engine)
    entered, released = threading.Event(), threading.Event()

    def hang(*_arguments: object) -> int:
        entered.set()
        released.wait()
        return 8

    monkeypatch.setattr(control, "cached_tokens", hang)

    async def play() -> None:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            looking = asyncio.create_task(
                http.post(f"{control.PREFIX}/lookup", json={"prompt": TOKENS})
            )
            await asyncio.get_running_loop().run_in_executor(None, entered.wait)
            assert (await http.get(f"{control.PREFIX}/stats")).status_code == 200
            assert not looking.done()
            released.set()
            assert (await looking).json()["cached_tokens"]["disk"] == 8

    asyncio.run(play())
