# SPDX-License-Identifier: Apache-2.0
"""What holds for every test."""

import os

from hypothesis import HealthCheck, settings

# The same examples in every run, and no judgement of how long they take: machines that run the
# suite are shared. PYTEST_ADDOPTS="--hypothesis-profile=default" explores.
settings.register_profile(
    "suite", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")

# Whether a test stores something must not depend on how full this machine's disk is.
os.environ.setdefault("PYKVCACHE_FREE_SPACE_MIN", "0")
