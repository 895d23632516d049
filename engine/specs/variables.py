"""Names of environment variables that a recipe may hand to a service or to a server."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

OWN_SECRETS = frozenset({"ROLEMESH_API_TOKEN"})
"""Variables that hold secrets of the coordinator; no child of it gets them."""

_OURS = "ROLEMESH_"
_OF_A_TOKEN = re.compile(r"(TOKEN|KEY)$", re.IGNORECASE)


def _foreign(name: str) -> str:
    if name.upper().startswith(_OURS):
        raise ValueError(
            f"{name!r} is a variable of rolemesh itself, and is handed to none: choose a variable "
            "of another name"
        )
    return name


def _of_a_token(name: str) -> str:
    if not _OF_A_TOKEN.search(name):
        raise ValueError(
            f"{name!r} does not end with TOKEN or KEY, so that it may hold something else, which "
            "would be sent: give the token a variable of its own, e.g. JUDGE_TOKEN"
        )
    return name


VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"), AfterValidator(_foreign)]
"""An environment variable that a process may be given."""

TokenVariable = Annotated[VariableName, AfterValidator(_of_a_token)]
"""An environment variable whose value may be sent to the server that a recipe names."""
