# SPDX-License-Identifier: Apache-2.0
"""Every errno that a file operation may end with, and every defect, mapped to a named failure."""

from __future__ import annotations

import errno

from pykvcache.layout import Defect
from pykvcache.transfer.jobs import Failure

_FAILURES = {
    errno.ENOENT: Failure.NOT_FOUND,
    errno.ENOTDIR: Failure.NOT_FOUND,
    errno.ESTALE: Failure.NOT_FOUND,
    errno.EACCES: Failure.PERMISSION,
    errno.EPERM: Failure.PERMISSION,
    errno.EROFS: Failure.PERMISSION,
    errno.ELOOP: Failure.PERMISSION,
    errno.EISDIR: Failure.WRONG_CONTENT,
    errno.ENOSPC: Failure.NO_SPACE,
    errno.EDQUOT: Failure.NO_SPACE,
    errno.EFBIG: Failure.NO_SPACE,
    errno.EMFILE: Failure.NO_DESCRIPTORS,
    errno.ENFILE: Failure.NO_DESCRIPTORS,
}


def failure_of(result: int) -> Failure:
    """Name a negative result; an errno without a name of its own is an I/O error."""
    return _FAILURES.get(-result, Failure.IO_ERROR)


def failure_of_defect(defect: Defect) -> Failure:
    """Name what is wrong with a file that could be read."""
    if defect is Defect.NO_TRAILER:
        return Failure.TRAILER
    return Failure.CHECKSUM if defect is Defect.CHECKSUM else Failure.WRONG_CONTENT
