# SPDX-License-Identifier: Apache-2.0
"""Keeps the root within its limits; ``policy`` and ``budget`` decide (pure)."""
