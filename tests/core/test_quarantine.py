# SPDX-License-Identifier: Apache-2.0
"""Bad files are moved out of the way, and never more than some are kept."""

from __future__ import annotations

import errno

import pytest

from pykvcache.layout import Defect
from pykvcache.transfer.operations import Action
from tests.core.driver import Driver, chunk_of

PATH = chunk_of("a").path
QUARANTINE = "root/quarantine"


def read_badly(driver: Driver, defect: Defect, name: str = "a") -> None:
    """A load of a file turns out to be of something else."""
    driver.load(chunk_of(name))
    driver.advance()
    driver.complete(driver.file(Action.OPEN))
    driver.complete(driver.file(Action.READ), defect=defect)
    driver.complete(driver.file(Action.CLOSE))


@pytest.mark.parametrize("defect", Defect)
def test_what_something_went_wrong_with_is_kept(defect: Defect) -> None:
    driver = Driver()
    read_badly(driver, defect)
    if defect in (Defect.FORMAT, Defect.BLOCKS):
        assert driver.file(Action.UNLINK).path == PATH
    else:
        moved = driver.file(Action.RENAME)
        assert (moved.path, moved.target) == (PATH, f"{QUARANTINE}/000.kv")
    driver.finish()
    driver.assert_at_rest()


def test_the_newest_replace_the_oldest() -> None:
    driver = Driver(quarantine_files_max=3)
    targets = []
    for number in range(5):
        read_badly(driver, Defect.CHECKSUM, f"chunk{number}")
        targets.append(driver.file(Action.RENAME).target)
        driver.finish()
    assert targets == [f"{QUARANTINE}/{number:03x}.kv" for number in (0, 1, 2, 0, 1)]


def test_none_are_kept_when_none_may_be() -> None:
    driver = Driver(quarantine_files_max=0)
    read_badly(driver, Defect.CHECKSUM)
    assert driver.file(Action.UNLINK).path == PATH


def test_the_directory_is_made_when_it_is_wanted() -> None:
    driver = Driver()
    read_badly(driver, Defect.KEY)
    driver.complete(driver.file(Action.RENAME), -errno.ENOENT)
    made = driver.file(Action.MKDIR)
    assert made.path == QUARANTINE
    driver.complete(made, -errno.EEXIST)
    driver.complete(driver.file(Action.RENAME))
    driver.assert_at_rest()


@pytest.mark.parametrize("step", ["move", "make", "move again"])
def test_what_cannot_be_kept_is_deleted(step: str) -> None:
    driver = Driver()
    read_badly(driver, Defect.KEY)
    if step != "move":
        driver.complete(driver.file(Action.RENAME), -errno.ENOENT)
    if step == "move again":
        driver.complete(driver.file(Action.MKDIR))
    driver.complete(driver.issued, -errno.ENOENT if step == "move again" else -errno.EACCES)
    assert driver.file(Action.UNLINK).path == PATH
    driver.finish()
    driver.assert_at_rest()
