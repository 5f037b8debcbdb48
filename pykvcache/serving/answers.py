# SPDX-License-Identifier: Apache-2.0
"""What a server answers, and what it tells at ``/metrics``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families


class ServingError(RuntimeError):
    """The server or a request failed; the message says how and quotes the log."""


@dataclass(frozen=True)
class Completion:
    """One answer. `logprobs` holds the chosen token's log-probability for every token."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    total_s: float


@dataclass
class Answer:
    """A completion while its events arrive."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    first_token_at: float | None = None

    def add(self, event: Mapping[str, Any], now: float) -> None:
        """Take in an event of the stream that arrived at ``now``.

        Raises:
            ServingError: the event is an error.
        """
        if "error" in event:
            raise ServingError(f"the server answered with an error: {event['error']}")
        for choice in event.get("choices", ()):
            token_ids = choice.get("token_ids") or ()
            if token_ids and self.first_token_at is None:
                self.first_token_at = now
            self.text.append(choice.get("text") or "")
            self.token_ids += token_ids
            self.logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or ()
        self.usage = event.get("usage") or self.usage

    def completed(self, started: float, now: float) -> Completion:
        """The whole, of a stream that ran from ``started`` to ``now``.

        Raises:
            ServingError: something is missing.
        """
        if self.first_token_at is None or not self.usage:
            raise ServingError("the server ended the stream without a token or without usage")
        details = self.usage.get("prompt_tokens_details") or {}
        return Completion(
            text="".join(self.text),
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            prompt_tokens=self.usage["prompt_tokens"],
            cached_tokens=details.get("cached_tokens") or 0,
            ttft_s=self.first_token_at - started,
            total_s=now - started,
        )


Labels = frozenset[tuple[str, str]]


class Metrics(dict[str, dict[Labels, float]]):
    """One reading of /metrics: sample name -> labels -> value."""

    @classmethod
    def parse(cls, text: str) -> Metrics:
        """From Prometheus' text format."""
        metrics = cls()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = frozenset(sample.labels.items())
                metrics.setdefault(sample.name, {})[labels] = sample.value
        return metrics

    def total(self, name: str, **labels: str) -> float:
        """Sum over every sample of `name` that carries `labels`; 0 when there is none."""
        wanted = labels.items()
        return math.fsum(value for key, value in self.get(name, {}).items() if wanted <= key)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums of `name` by the value of `label`."""
        sums: dict[str, float] = {}
        for key, value in self.get(name, {}).items():
            name_of_sum = dict(key).get(label, "")
            sums[name_of_sum] = sums.get(name_of_sum, 0.0) + value
        return sums
