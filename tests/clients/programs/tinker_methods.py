"""Prints the names of all public methods of Tinker's SDK as JSON."""

from __future__ import annotations

import json

from tinker_recorder import public_methods

print(json.dumps(sorted(public_methods())))
