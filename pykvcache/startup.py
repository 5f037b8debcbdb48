# SPDX-License-Identifier: Apache-2.0
"""What can be checked before a model is loaded: the root, and what its filesystem allows."""

from __future__ import annotations

import os
from pathlib import Path

from pykvcache.access import access_of, make_directories
from pykvcache.config import Config
from pykvcache.errors import ConfigError
from pykvcache.reactor.probe import choose_direct, choose_engine


def check_root(config: Config) -> None:
    """Make the root and try to store a page in it, the way the options ask for.

    Raises:
        ConfigError: the root cannot be made or written, or could be changed by others, or the
            engine or direct I/O that the options demand does not work there.
    """
    try:
        root = Path(os.path.realpath(config.root))
        make_directories(root, root, access_of(config))
    except OSError as error:
        raise ConfigError(
            f"option 'root' is '{config.root}': cannot make it ({error.strerror}: "
            f"'{error.filename}'); it must be a directory that this user can write, or can make"
        ) from None
    direct = choose_direct(config.direct_io, root)
    choose_engine(config.io_engine, root, direct.direct)
