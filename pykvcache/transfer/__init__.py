# SPDX-License-Identifier: Apache-2.0
"""The pure core: what to do next, given what has completed. No I/O, threads or clocks."""
