# SPDX-License-Identifier: Apache-2.0
"""Makes the virtual environment of this checkout; run as `make env`."""

import sys

if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    sys.exit(
        "error: Python {}.{} isn't supported, 3.11, 3.12 and 3.13 are; name another one with "
        "`make env PYTHON=python3.12`".format(*sys.version_info[:2])
    )

from distribution.environment import main

if __name__ == "__main__":
    sys.exit(main())
