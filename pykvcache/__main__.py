# SPDX-License-Identifier: Apache-2.0
"""``python -m pykvcache``."""

from pykvcache.cli import main

main()
