# SPDX-License-Identifier: Apache-2.0
"""Errors of the system as named failures."""

from __future__ import annotations

import errno

import pytest

from pykvcache.transfer.jobs import Failure
from pykvcache.transfer.outcomes import failure_of


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        (errno.ENOENT, Failure.NOT_FOUND),
        (errno.ENOTDIR, Failure.NOT_FOUND),
        (errno.ESTALE, Failure.NOT_FOUND),
        (errno.EACCES, Failure.PERMISSION),
        (errno.EPERM, Failure.PERMISSION),
        (errno.EROFS, Failure.PERMISSION),
        (errno.ELOOP, Failure.PERMISSION),
        (errno.EISDIR, Failure.WRONG_CONTENT),
        (errno.ENOSPC, Failure.NO_SPACE),
        (errno.EDQUOT, Failure.NO_SPACE),
        (errno.EFBIG, Failure.NO_SPACE),
        (errno.EMFILE, Failure.NO_DESCRIPTORS),
        (errno.ENFILE, Failure.NO_DESCRIPTORS),
        (errno.EIO, Failure.IO_ERROR),
        (errno.EINVAL, Failure.IO_ERROR),
    ],
)
def test_an_error_has_its_name(code: int, failure: Failure) -> None:
    assert failure_of(-code) is failure


def test_every_error_of_the_system_has_some_name() -> None:
    assert all(isinstance(failure_of(-code), Failure) for code in errno.errorcode)
    assert failure_of(-4095) is Failure.IO_ERROR
