"""Settings for all tests.

Hypothesis has no deadline, since time is the business of benchmarks; and in CI it draws the same
examples each time, so that a red run can be repeated.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("penstock", deadline=None, print_blob=True)
settings.register_profile("ci", parent=settings.get_profile("penstock"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "penstock")
