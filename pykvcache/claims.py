# SPDX-License-Identifier: Apache-2.0
"""A rank's place in the root: made when its server starts, and again if somebody has removed it."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from pykvcache.access import Access, make_directories
from pykvcache.errors import ConfigError
from pykvcache.identity import Identity, RankIdentity, claim_directory
from pykvcache.layout import QUARANTINE, rank_directory


class Claim:
    """The directories of one rank.

    Who clears a cache by removing its directories finds it filled again. Where a filesystem was
    unmounted nothing is made: chunks would fill the one below its mount point.
    """

    def __init__(
        self,
        root: Path,
        access: Access,
        server: Identity,
        rank: RankIdentity,
        log: logging.Logger,
    ) -> None:
        """Make them, or check those that are there.

        Args:
            root: the option, resolved: no symbolic link.
            access: whose they are, or may be.
            server: what all ranks' files depend on.
            rank: what this one's depend on beyond that.
            log: takes what an operator should know.

        Raises:
            ConfigError: as :func:`~pykvcache.identity.claim_directory`.
        """
        self._root = root
        self._access = access
        self._server = server
        self._rank = rank
        self._log = log
        self._server_directory = server.directory(root)
        self.directory = rank_directory(self._server_directory, rank.rank)
        """The rank's."""
        self._make()
        self._device = os.stat(root).st_dev
        self._renewing = threading.Lock()
        self._said = ""

    def renew(self) -> None:
        """Make them anew if they are missing; soon, on a thread, because a filesystem may hang.
        To be called when a store found no directory; never blocks."""
        if self._renewing.acquire(blocking=False):
            threading.Thread(target=self._renew, name="pykvcache-claim", daemon=True).start()

    def _renew(self) -> None:
        try:
            self._renew_if_missing()
        finally:
            self._renewing.release()

    def _renew_if_missing(self) -> None:
        try:
            if self.directory.is_dir():
                return
            if not self._is_on_its_filesystem():
                self._say(f"another filesystem is mounted at '{self._root}' than at the start")
                return
            self._make()
        except (ConfigError, OSError) as error:
            self._say(str(error))
            return
        self._said = ""
        self._log.warning(
            "KV offloading: '%s' had been removed with all chunks, and is made anew", self.directory
        )

    def _say(self, why: str) -> None:
        """Once, until it is another reason or all is well."""
        if why != self._said:
            self._said = why
            self._log.warning(
                "KV offloading stores nothing for now: '%s' is gone, and %s", self.directory, why
            )

    def _is_on_its_filesystem(self) -> bool:
        for place in (self._root, *self._root.parents):
            try:
                return os.stat(place).st_dev == self._device
            except FileNotFoundError:
                continue
        return False

    def _make(self) -> None:
        claim_directory(self._server, self._server_directory, self._root, self._access)
        claim_directory(self._rank, self.directory, self._root, self._access)
        make_directories(self.directory / QUARANTINE, self._root, self._access)
