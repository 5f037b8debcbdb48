# SPDX-License-Identifier: Apache-2.0
"""A sliding window gives blocks up while its chunks wait to be stored, and others take them.

An engine with few blocks answers many prompts at once, in steps and windows much shorter than a
chunk, and keeps windows everywhere: chunks are stored without their first blocks, or not at all.
What it stored is compared, block by block, with the files of an engine that had room.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pykvcache.layout import PAGE, BlockSpan, Trailer, decode_trailer
from tests.models.conftest import Checkpoints
from tests.models.engine import Group
from tests.models.kinds import Kind, assert_same, kv_files, prompt, whole_chunks

BLOCK = 32
BLOCKS_PER_CHUNK = 16
PRESSED = Kind(
    "gemma3",
    (
        Group("SlidingWindowSpec", BLOCK, 2),
        Group("SlidingWindowSpec", BLOCK, 1),
        Group("FullAttentionSpec", BLOCK, 2),
    ),
    whole_chunks,
    {
        "block_size": BLOCK,
        "max_model_len": 1280,
        "max_num_batched_tokens": 100,
        "max_num_seqs": 8,
        "prefix_cache_retention_interval": None,
    },
)
OPTIONS = {"tokens_per_chunk": BLOCKS_PER_CHUNK * BLOCK}
BLOCKS_FEW = 100
"""Some 16 more than the longest prompt needs by itself."""

PROMPTS = [prompt(500 + 37 * n, 100 + n) for n in range(16)]


def contents(path: Path, group: Group) -> tuple[Trailer, npt.NDArray[np.float32]]:
    """A file's trailer and its payload as [layer, block, numbers]."""
    content = path.read_bytes()
    trailer = decode_trailer(content[-PAGE:])
    assert isinstance(trailer, Trailer)
    payload = np.frombuffer(content[: trailer.payload_bytes], np.float32)
    return trailer, payload.reshape(group.layers, BLOCKS_PER_CHUNK, -1)


@pytest.mark.soak
def test_a_block_is_never_stored_in_the_place_of_another(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    checkpoint = checkpoints[PRESSED.model]
    roomy, pressed = tmp_path / "roomy", tmp_path / "pressed"
    with PRESSED.engine(checkpoint, roomy, tmp_path / "roomy.log", options=OPTIONS) as engine:
        assert engine.groups() == list(PRESSED.groups)
        expected = engine.ask(PROMPTS)
        engine.settle()
    with PRESSED.engine(
        checkpoint,
        pressed,
        tmp_path / "pressed.log",
        options=OPTIONS,
        num_gpu_blocks_override=BLOCKS_FEW,
    ) as engine:
        assert_same(engine.ask(PROMPTS, together=True), expected)
        engine.settle()
    with PRESSED.engine(checkpoint, pressed, tmp_path / "again.log", options=OPTIONS) as engine:
        assert_same(engine.ask(PROMPTS), expected)
        assert engine.counters()["chunks{direction=load,outcome=transferred}"] > 0

    spans: Counter[BlockSpan] = Counter()
    for number, group in enumerate(PRESSED.groups):
        reference = {path.name: path for path in kv_files(roomy, number)}
        for path in kv_files(pressed, number):
            trailer, payload = contents(path, group)
            whole, expected_payload = contents(reference[path.name], group)
            spans[trailer.span] += 1
            shared = slice(max(trailer.span.first, whole.span.first), BLOCKS_PER_CHUNK)
            np.testing.assert_allclose(
                payload[:, shared], expected_payload[:, shared], rtol=1e-3, atol=1e-3
            )
            assert not payload[:, : trailer.span.first].any()
    assert sum(spans.values()) > len(PROMPTS)
    assert any(span.first for span in spans), "the pressure was too low to show anything"
