# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention: its pages come back as they were, and where vLLM's own kernel
cannot continue from them, the server doesn't start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.conftest import Checkpoints
from tests.models.engine import EngineError, Group
from tests.models.kinds import (
    SLOTS_FEW,
    Kind,
    assert_same,
    kv_files,
    prompt,
    small_pool_gib,
    whole_chunks,
)

AMX = torch.cpu._is_amx_tile_supported()
MLA = Kind("deepseek_v2", (), whole_chunks, {"dtype": "bfloat16" if AMX else "float32"})
"""vLLM's kernel for AMX knows no float32."""

PROMPTS = [prompt(257, 1), prompt(524, 2), prompt(1025, 3)]
"""Their last chunk border is their last border of 16 tokens too, so that disk and memory hold the
same prefix: without AMX an answer depends on where the cached prefix ends."""


@pytest.mark.skipif(AMX, reason="with AMX vLLM has a kernel for it that works")
def test_without_a_working_kernel_the_server_does_not_start(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    with (
        pytest.raises(EngineError, match=r"multi-head latent attention .* no AMX"),
        MLA.engine(checkpoints[MLA.model], tmp_path / "root", tmp_path / "log"),
    ):
        pass
    assert not (tmp_path / "root").exists()


def test_pages_come_back_as_they_were(checkpoints: Checkpoints, tmp_path: Path) -> None:
    root, checkpoint = tmp_path / "root", checkpoints[MLA.model]
    with MLA.engine(checkpoint, root, tmp_path / "first", prefix_caching_forced=not AMX) as first:
        (group,) = first.groups()
        assert group == Group("MLAAttentionSpec", group.tokens_per_block, 2)
        first.ask(PROMPTS)
        from_memory = first.ask(PROMPTS)
        first.settle()
    with MLA.engine(
        checkpoint,
        root,
        tmp_path / "second",
        prefix_caching_forced=not AMX,
        options=SLOTS_FEW,
        kv_offloading_size=small_pool_gib(root),
    ) as second:
        from_disk = second.ask(PROMPTS)
        counters = second.counters()
    assert_same(from_disk, from_memory)
    assert [answer.cached_tokens for answer in from_disk] == [256, 512, 1024]
    assert (
        counters["chunks{direction=load,outcome=transferred}"] == 1 + 2 + 4 == len(kv_files(root))
    )
