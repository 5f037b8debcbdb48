# SPDX-License-Identifier: Apache-2.0
"""Load or recompute: what a cache hit would cost either way, and which is faster.

Pure like the transfer core: no clock, thread, file or random number. Sections 4.1, 5.2, 6.6
and 8.3 of the paper.
"""
