# SPDX-License-Identifier: Apache-2.0
"""A calibration: what one machine takes for one model, measured once and kept in a file."""
