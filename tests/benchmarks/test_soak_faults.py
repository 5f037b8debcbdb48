# SPDX-License-Identifier: Apache-2.0
"""The harm that the soak does is done, and undone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.soak_faults import FAULTS, Fault
from tests.capacity.roots import Root

FILES = 12
SIZE = 3 * 4096
LASTING = {"deleted", "truncated", "flipped", "swapped"}


def content(root: Root) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.path.rglob("*.kv") if path.is_file()}


@pytest.fixture
def root(tmp_path: Path) -> Root:
    root = Root(tmp_path / "kv")
    for number in range(FILES):
        root.add(number, SIZE, 0.0).write_bytes(bytes([number]) * SIZE)
    return root


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
@pytest.mark.parametrize("seed", range(5))
def test_a_fault_harms_and_goes(fault: Fault, seed: int, root: Root) -> None:
    before = content(root)
    undo = fault.begin(root.path, random.Random(seed))
    during = content(root)
    assert during != before
    assert (undo is None) == (fault.name in LASTING)
    if undo is None:
        changed = [path for path in before if during.get(path) != before[path]]
        assert len(changed) == 1
        return
    undo()
    assert content(root).items() <= before.items()
    assert len(content(root)) >= FILES - 1


def test_a_flipped_bit_is_in_the_payload(root: Root) -> None:
    before = content(root)
    fault = next(fault for fault in FAULTS if fault.name == "flipped")
    fault.begin(root.path, random.Random(3))
    for path, data in content(root).items():
        assert data[-4096:] == before[path][-4096:]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_an_empty_root_cannot_be_harmed(fault: Fault, tmp_path: Path) -> None:
    with pytest.raises((OSError, IndexError, ValueError)):
        fault.begin(tmp_path, random.Random(1))


def test_files_that_come_back_to_a_new_directory_are_lost(root: Root) -> None:
    fault = next(fault for fault in FAULTS if fault.name == "unmounted")
    undo = fault.begin(root.path, random.Random(1))
    assert undo is not None
    root.add(100, SIZE, 0.0)
    undo()
    assert root.numbers() == [100]
    assert not list(root.path.rglob("*-away"))
