# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side: which chunks exist, which are being stored, which failed."""
