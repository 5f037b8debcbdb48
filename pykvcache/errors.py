# SPDX-License-Identifier: Apache-2.0
"""The three kinds of failure: a refused configuration, a bug of ours, an I/O outcome.

I/O outcomes are values (:class:`pykvcache.transfer.jobs.Failure`), not exceptions:
a chunk that cannot be read is a miss.
"""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting that cannot work; the message names the option, its value and what would do."""


class InvariantError(RuntimeError):
    """A bug of this package: an illegal transition, a lost or doubly released slot."""
