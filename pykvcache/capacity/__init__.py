# SPDX-License-Identifier: Apache-2.0
"""Keeps the root within its limits: what is there, what goes first, who removes it.

``scan`` reads the directory, ``policy`` and ``budget`` decide (pure), ``evictor`` removes
under one lock for all processes, ``keeper`` is the thread in which a server does it.
"""
