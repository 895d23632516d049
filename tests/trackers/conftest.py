"""Tests that need the packages of others, which have an environment of their own.

`make test-trackers` runs them; they pin other packages to older versions, so that ours cannot hold
them, and `make test` leaves these files alone.
"""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("swanlab") else ["test_*.py"]
