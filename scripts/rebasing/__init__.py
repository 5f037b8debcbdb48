# SPDX-License-Identifier: Apache-2.0
"""Keeps the patch series on new versions of vLLM; the command is scripts/patches.py.

``workspace`` is the git repository in which a series is a branch, ``seams`` checks what the
overlay takes from upstream, ``burden`` counts what the patches touch.
"""
