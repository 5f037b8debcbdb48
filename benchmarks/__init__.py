# SPDX-License-Identifier: Apache-2.0
"""Measurements as ratios in one run: interleaved, repeated, against the disk and peers."""
