# SPDX-License-Identifier: Apache-2.0
"""Builds the distribution `vllm` = upstream wheel + patches + overlay + package `pykvcache`.

    errors        the one exception that users see, without a traceback
    upstream      upstream.toml: which wheel, and which version ours gets
    fetch         the pinned wheel: downloaded, cached, verified
    patches       a patch series applied to the files that it touches
    metadata      METADATA, WHEEL, entry points, vllm/_version.py rewritten
    archive       a wheel writer that copies members as compressed bytes
    contents      the plan: every member of the finished wheel and where it comes from
    wheel         the plan written as a wheel
    editable      the plan laid out as a tree whose overlay and package are links
    delta         the plan as changes to an installed vLLM, for the CUDA image
    conflicts     other installed distributions that own the same files
    backend       the PEP 517 and PEP 660 hooks that pip calls
    environment   `make env`

Only the standard library is used, so an isolated build installs nothing but pip. A PEP 517
backend of our own is used rather than setuptools with overridden commands: nothing here is built
from sources, so every setuptools command would have to be replaced, against interfaces that it
does not promise to keep.
"""
