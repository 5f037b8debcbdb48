# SPDX-License-Identifier: Apache-2.0
"""Measures what a machine takes to compute and to load a model's KV. Serving never imports it."""
