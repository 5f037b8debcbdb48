# SPDX-License-Identifier: Apache-2.0
"""What a calibration predicts, and which files are refused with which words."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvcache.errors import ConfigError
from pykvcache.gate.calibration import (
    AGE_MAX_S,
    Calibration,
    CalibrationError,
    CalibrationFile,
    ComputeCurve,
    Fingerprint,
    Sample,
    TierCurve,
    calibration_path,
    find_calibration,
    fingerprint_of,
    load_calibration,
    save_calibration,
    speed_settings,
)
from pykvcache.machine import Machine
from tests.calibrate.fake_serving import CONFIGURATION, IDENTITY, MACHINE

NOW = datetime(2026, 12, 3, tzinfo=UTC)
FINGERPRINT = fingerprint_of(MACHINE, IDENTITY, speed_settings(CONFIGURATION))


def content_of(
    compute: ComputeCurve, disk: TierCurve, dram: TierCurve | None = None
) -> CalibrationFile:
    return CalibrationFile(
        fingerprint=FINGERPRINT,
        versions={"vllm": "0.32.0"},
        date=NOW,
        f={256: 0.5},
        compute=compute,
        tiers={"disk": disk, "dram": dram} if dram else {"disk": disk},
        error={},
        samples=(Sample(kind="compute", context=0, tokens=256, seconds=0.5),),
    )


CONTENT = content_of(
    ComputeCurve(step_s=0.1, tokens=(256, 512), seconds=(0.5, 1.1)),
    TierCurve(tokens=(256, 512), bytes=(1000, 2000), seconds=(0.2, 0.3)),
)


# --- what it predicts


@st.composite
def curves(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Ascending places with seconds that never fall."""
    places = draw(st.lists(st.integers(1, 200_000), min_size=1, max_size=8, unique=True))
    seconds = draw(
        st.lists(st.floats(0, 100), min_size=len(places), max_size=len(places)).map(sorted)
    )
    return tuple(sorted(places)), tuple(seconds)


@st.composite
def calibrations(draw: st.DrawFn) -> Calibration:
    tokens, compute_s = draw(curves())
    sizes, load_s = draw(curves())
    return Calibration(
        content_of(
            ComputeCurve(step_s=draw(st.floats(0, 1)), tokens=tokens, seconds=compute_s),
            TierCurve(tokens=sizes, bytes=sizes, seconds=load_s),
        )
    )


PLACES = st.integers(0, 400_000)


@given(calibrations(), PLACES, PLACES, PLACES)
def test_computing_more_takes_no_less(
    calibration: Calibration, start: int, end: int, longer: int
) -> None:
    start, end, longer = sorted((start, end, longer))
    shorter_s, longer_s = calibration.compute_s(start, end), calibration.compute_s(start, longer)
    assert 0 <= shorter_s <= longer_s + 1e-9
    assert calibration.compute_s(end, longer) <= longer_s + 1e-9


@given(calibrations(), PLACES, PLACES)
def test_loading_more_takes_no_less(calibration: Calibration, size: int, more: int) -> None:
    size, more = sorted((size, more))
    assert 0 <= calibration.load_s("disk", size) <= calibration.load_s("disk", more) + 1e-9
    assert calibration.bandwidth("disk") > 0


@given(calibrations())
def test_what_was_measured_is_predicted(calibration: Calibration) -> None:
    content = calibration.content
    for tokens, seconds in zip(content.compute.tokens, content.compute.seconds, strict=True):
        expected = seconds + content.compute.step_s
        assert calibration.compute_s(0, tokens) == pytest.approx(expected)
    disk = content.tiers["disk"]
    for size, seconds in zip(disk.bytes, disk.seconds, strict=True):
        assert calibration.load_s("disk", size) == pytest.approx(seconds)


def test_nothing_takes_no_time() -> None:
    calibration = Calibration(CONTENT)
    assert calibration.compute_s(256, 256) == calibration.load_s("disk", 0) == 0


def test_beyond_the_last_point_it_goes_straight_on() -> None:
    calibration = Calibration(CONTENT)
    last = calibration.compute_s(0, 512)
    per_256 = calibration.compute_s(0, 768) - last
    assert per_256 >= 0.6
    assert calibration.compute_s(0, 1024) - last == pytest.approx(2 * per_256)
    assert calibration.load_s("disk", 12_000) == pytest.approx(0.3 + 10_000 * 0.3 / 2000)
    assert calibration.bandwidth("disk") == pytest.approx(2000 / 0.3)


def test_a_load_has_a_part_beside_its_bytes() -> None:
    assert Calibration(CONTENT).load_s("disk", 1) == pytest.approx(0.1, rel=0.01)


def test_dram_that_was_not_measured_is_taken_for_the_disk() -> None:
    calibration = Calibration(CONTENT)
    assert calibration.load_s("dram", 1500) == calibration.load_s("disk", 1500)


# --- whose it is


def test_what_does_not_change_the_speed_changes_no_fingerprint() -> None:
    other = IDENTITY.model_copy(update={"namespace": "tenant", "hash_seed": "7"})
    assert fingerprint_of(MACHINE, other, speed_settings(CONFIGURATION)) == FINGERPRINT


@pytest.mark.parametrize("change", [{"cache_dtype": "bfloat16"}, {"blocks_per_chunk": 1}])
def test_another_cache_is_another_fingerprint(change: dict[str, Any]) -> None:
    other = IDENTITY.model_copy(update=change)
    assert fingerprint_of(MACHINE, other, speed_settings(CONFIGURATION)).digest != (
        FINGERPRINT.digest
    )


def test_settings_are_those_of_vllms_objects_too() -> None:
    objects = SimpleNamespace(
        **{name: SimpleNamespace(**fields) for name, fields in CONFIGURATION.items()}
    )
    expected = {"max_num_batched_tokens": 2048, "enforce_eager": True}
    assert speed_settings(objects) == speed_settings(CONFIGURATION) == expected


# --- files


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = calibration_path(tmp_path, FINGERPRINT)
    save_calibration(CONTENT, path)
    return path


def test_a_file_is_read_as_it_was_written(path: Path, tmp_path: Path) -> None:
    assert load_calibration(path, FINGERPRINT, NOW.timestamp()).content == CONTENT
    found = find_calibration(tmp_path, FINGERPRINT, NOW.timestamp())
    assert found is not None and found.content == CONTENT
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_without_a_file_there_is_none(tmp_path: Path) -> None:
    assert find_calibration(tmp_path, FINGERPRINT, NOW.timestamp()) is None


def refusal(path: Path, fingerprint: Fingerprint = FINGERPRINT, later_s: float = 0.0) -> str:
    with pytest.raises(CalibrationError) as refused:
        load_calibration(path, fingerprint, NOW.timestamp() + later_s)
    assert isinstance(refused.value, ConfigError)
    message = str(refused.value)
    assert f"'{path}'" in message
    return message


def test_what_is_no_json_is_refused(path: Path) -> None:
    path.write_text("tokens,seconds\n")
    assert "is not JSON" in refusal(path)
    path.write_bytes(b"\xff\xfe\x00")
    assert "is not JSON" in refusal(path)
    path.write_text("[]")
    assert "is not a JSON object" in refusal(path)


def test_a_file_that_cannot_be_read_is_refused(path: Path) -> None:
    path.unlink()
    assert "cannot be read: No such file" in refusal(path)
    path.mkdir()
    assert "cannot be read: Is a directory" in refusal(path)


def test_a_file_without_end_is_refused() -> None:
    assert "too long: at most 64 MiB" in refusal(Path("/dev/zero"))


def change(*names: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def changed(document: dict[str, Any]) -> None:
        part: Any = document
        for name in names[:-1]:
            part = part[name]
        part[names[-1]] = value

    return changed


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (change("format_version", value=2), "format_version is 2: must be 1"),
        (change("compute", "step_s", value=-1), "compute.step_s is -1: input should be greater"),
        (change("compute", "step_s", value="x"), "compute.step_s is 'x': input should be a valid"),
        (change("compute", "seconds", value=[2, 1]), "seconds must not fall"),
        (change("compute", "seconds", value=[1]), "has 2 tokens and 1 seconds"),
        (change("compute", "tokens", value=[512, 256]), "tokens must be above 0 and ascend"),
        (change("compute", "tokens", value=[0, 256]), "tokens must be above 0 and ascend"),
        (change("tiers", "disk", "bytes", value=[5, 5]), "bytes must be above 0 and ascend"),
        (change("tiers", value={}), "tiers is {}: has no 'disk'"),
        (change("tiers", "tape", value=1), "tiers.tape"),
        (change("date", value="yesterday"), "date is 'yesterday'"),
        (change("date", value="2026-12-03T00:00:00"), "input should have timezone"),
        (change("more", value=1), "more is 1: extra inputs are not permitted"),
        (change("samples", 0, "context", value=256), "context is 256: must be below tokens, 256"),
        (change("samples", 0, "bytes", value=9), "bytes is 9: must be 0 where kind is 'compute'"),
    ],
)
def test_a_malformed_file_is_refused(
    path: Path, broken: Callable[[dict[str, Any]], None], words: str
) -> None:
    document = json.loads(path.read_text())
    broken(document)
    path.write_text(json.dumps(document))
    assert words in refusal(path)


def test_no_number_may_be_nan_or_without_end(path: Path) -> None:
    text = path.read_text()
    for word in ("NaN", "Infinity"):
        path.write_text(text.replace('"step_s": 0.1', f'"step_s": {word}'))
        assert "compute.step_s" in refusal(path)


def test_a_foreign_machine_is_refused(path: Path) -> None:
    machine = Machine(**{**MACHINE.model_dump(), "cpus": 64})
    message = refusal(path, Fingerprint(machine=machine, model=FINGERPRINT.model))
    assert "is of another machine: cpus is 2: must be 64" in message


def test_a_foreign_model_is_refused(path: Path) -> None:
    model = {**FINGERPRINT.model, "engine": "vllm 0.33.0"}
    message = refusal(path, Fingerprint(machine=MACHINE, model=model))
    assert "is of another model: engine is 'vllm 0.32.0': must be 'vllm 0.33.0'" in message


def test_an_old_file_is_refused(path: Path) -> None:
    assert "must be within the last 180 days" in refusal(path, later_s=AGE_MAX_S + 1)
    assert "date is 2026-12-03" in refusal(path, later_s=-2 * 86400)


def test_a_place_that_cannot_be_written_is_named(path: Path) -> None:
    with pytest.raises(CalibrationError, match="cannot be written"):
        save_calibration(CONTENT, path / "below-a-file.json")
