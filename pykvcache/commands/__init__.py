# SPDX-License-Identifier: Apache-2.0
"""The groups of the ``pykvcache`` command."""
