# SPDX-License-Identifier: Apache-2.0
"""The failure that a user can do something about."""

from __future__ import annotations


class BuildError(Exception):
    """What is wrong and what would be accepted; shown to the user without a traceback."""
