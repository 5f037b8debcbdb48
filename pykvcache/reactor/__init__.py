# SPDX-License-Identifier: Apache-2.0
"""The shell around the core: one thread, an I/O engine, the device's copies."""
