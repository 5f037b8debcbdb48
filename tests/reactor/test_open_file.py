# SPDX-License-Identifier: Apache-2.0
"""Opening files where openat2(2) does not exist or is forbidden."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from pykvcache import openat2
from pykvcache.reactor.calls import create_flags, open_file, open_how, read_flags


@pytest.fixture(params=["new kernel", "old kernel"])
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "old kernel":
        monkeypatch.setattr(openat2, "SYSTEM_CALL", 100_000)


@pytest.mark.usefixtures("_kernel")
def test_files_are_created_and_opened_and_links_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    os.close(open_file(os.fsencode(path), open_how(create_flags(False), 0o600)))
    os.close(open_file(os.fsencode(path), open_how(read_flags(False))))
    with pytest.raises(FileExistsError):
        open_file(os.fsencode(path), open_how(create_flags(False), 0o600))
    with pytest.raises(FileNotFoundError):
        open_file(os.fsencode(tmp_path / "none"), open_how(read_flags(False)))
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic links") as refused:
        open_file(os.fsencode(tmp_path / "link"), open_how(read_flags(False)))
    assert refused.value.errno == errno.ELOOP
