# SPDX-License-Identifier: Apache-2.0
"""Many clients at once, some of which hang up: while they wait, while their prefix is loaded, or in
the middle of an answer.

When one hangs up is counted in events that all clients have received together, not in seconds, so
that it falls into every state of a request whatever the machine's speed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from scripts.serving import SERVED_NAME

REQUEST_DEADLINE_S = 300.0


class Pulse:
    """Counts the events that all clients receive."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = asyncio.Condition()

    async def beat(self) -> None:
        async with self._changed:
            self._count += 1
            self._changed.notify_all()

    async def after(self, events: int) -> None:
        """Return when so many more events have come."""
        target = self._count + events
        async with self._changed:
            await self._changed.wait_for(lambda: self._count >= target)


@dataclass
class Outcome:
    """What the clients saw."""

    answers: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """Number of the prompt, and the answer's tokens."""
    hung_up: int = 0
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Crowd:
    """So many clients, each of which asks prompt after prompt."""

    port: int
    prompts: Sequence[Sequence[int]]
    answer_tokens: int
    clients: int = 32
    hang_up_share: float = 0.5
    patience: int = 40
    """Most events after which one hangs up."""

    def ask(self, seed: int, more: Callable[[int], bool]) -> Outcome:
        """Let every client ask while ``more(its requests so far)`` says so."""
        return asyncio.run(self._ask(seed, more))

    async def _ask(self, seed: int, more: Callable[[int], bool]) -> Outcome:
        outcome, pulse = Outcome(), Pulse()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self.port}",
            timeout=REQUEST_DEADLINE_S,
            limits=limits,
            trust_env=False,
        ) as http:
            sources = [random.Random(f"{seed} {number}") for number in range(self.clients)]
            await asyncio.gather(
                *(self._client(http, source, pulse, outcome, more) for source in sources)
            )
        return outcome

    async def _client(
        self,
        http: httpx.AsyncClient,
        source: random.Random,
        pulse: Pulse,
        outcome: Outcome,
        more: Callable[[int], bool],
    ) -> None:
        asked = 0
        while more(asked):
            asked += 1
            number = source.randrange(len(self.prompts))
            request = asyncio.create_task(self._request(http, number, pulse, outcome))
            if source.random() < self.hang_up_share:
                patience = asyncio.create_task(pulse.after(source.randrange(self.patience)))
                await asyncio.wait((request, patience), return_when=asyncio.FIRST_COMPLETED)
                patience.cancel()
                outcome.hung_up += request.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await request

    async def _request(
        self, http: httpx.AsyncClient, number: int, pulse: Pulse, outcome: Outcome
    ) -> None:
        body: dict[str, Any] = {
            "model": SERVED_NAME,
            "prompt": list(self.prompts[number]),
            "max_tokens": self.answer_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        tokens: list[int] = []
        async with http.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != httpx.codes.OK:
                outcome.errors.append(f"HTTP {reply.status_code}")
                return
            async for line in reply.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    await pulse.beat()
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        outcome.errors.append(str(event["error"]))
                    for choice in event.get("choices", ()):
                        tokens += choice.get("token_ids") or ()
        outcome.answers.append((number, tuple(tokens)))
