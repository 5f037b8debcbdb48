# SPDX-License-Identifier: Apache-2.0
"""KV-cache offloading to hash-addressed files; the part that does not know vLLM.

``config`` and ``identity`` say what is stored where and for whom, ``layout`` names
files and pages, ``pool`` owns the staging memory, ``transfer`` decides (pure),
``reactor`` does (threads, io_uring, device copies), ``scheduler`` looks up and plans.
"""
