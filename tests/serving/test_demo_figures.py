# SPDX-License-Identifier: Apache-2.0
"""What the demonstration makes of its measurements, and what it refuses to run with."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from scripts import demo


def result(cold_s: float, disk_s: float, memory_s: list[float], read_s: float) -> demo.PromptResult:
    return demo.PromptResult(
        prompt_tokens=7440,
        cold_ttft_s=cold_s,
        files=[Path("a.kv"), Path("b.kv")],
        memory_ttfts_s=memory_s,
        disk_ttft_s=disk_s,
        disk_cached_tokens=7424,
        bytes_read=1000,
        read_s=read_s,
    )


RESULTS = [
    result(20.0, 0.5, [0.4, 0.3, 9.0], 0.10),
    result(30.0, 0.6, [0.5], 0.20),
    result(10.0, 0.4, [0.2], 0.30),
]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.setattr(demo.importlib.metadata, "version", lambda name: f"{name} 1")
    return demo.summary(RESULTS, "float32")


def test_the_summary_holds_medians_over_the_prompts(figures: dict[str, object]) -> None:
    expected = {
        "prompt_tokens": 7440,
        "cold_ttft_s": 20.0,
        "disk_ttft_s": 0.5,
        "memory_ttft_s": 0.4,
        "read_s": 0.20,
        "speedup": 40.0,
        "bytes_read": 1000,
        "files": 2,
    }
    assert {key: figures[key] for key in expected} == pytest.approx(expected)


def test_the_added_latency_is_compared_with_the_read(figures: dict[str, object]) -> None:
    assert figures["added_s"] == pytest.approx(0.1)
    assert figures["added_over_read"] == pytest.approx(0.5)


def test_the_table_has_a_row_for_each_prompt_and_fits_80_columns(
    figures: dict[str, object],
) -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(demo.table_of(figures))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line for line in lines if "7,440" in line]
    assert len(rows) == len(RESULTS) + 1
    assert "median" in rows[-1] and "0.500 s" in rows[-1] and "40x" in rows[-1]


@pytest.mark.parametrize(
    ("version", "flags", "dtype"),
    [
        ("0.33.0+pykvcache.1", "avx2", "bfloat16"),
        ("0.32.0+cpu.pykvcache.1", "avx2 fma", "float32"),
        ("0.32.0+cpu.pykvcache.1", "avx2 avx512bw", "bfloat16"),
        ("0.32.0+cpu.pykvcache.1", "asimd bf16", "bfloat16"),
    ],
)
def test_bfloat16_where_it_is_fast(version: str, flags: str, dtype: str) -> None:
    assert demo.choose_dtype(version, f"flags : {flags}\n") == dtype


def test_every_reason_not_to_run_is_given_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "BUILD", tmp_path)
    monkeypatch.setattr(demo.importlib.metadata, "version", lambda _: "0.32.0")
    monkeypatch.setattr(demo, "DISK_NEEDED_BYTES", 1 << 60)
    with pytest.raises(demo.DemoError) as refused:
        demo.check_environment(9000)
    reasons = str(refused.value).splitlines()
    assert len(reasons) == 3
    assert "at most 8176" in reasons[0]
    assert "vllm 0.32.0" in reasons[1] and "make env" in reasons[1]
    assert "MiB needed" in reasons[2]
