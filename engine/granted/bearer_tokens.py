"""Tokens that go along to servers, from the environment."""

from __future__ import annotations

import os
import re

_TOKEN = re.compile(r"[!-~]+")
"""Visible ASCII."""


def bearer_token(variable: str | None, process: str) -> str | None:
    """The token to send; None if no variable is named.

    Args:
        variable: Of the environment.
        process: Whose environment it is, for messages, e.g. "the reward service".

    Raises:
        ValueError: The variable is not set, or holds text that no header may have.
    """
    if variable is None:
        return None
    token = os.environ.get(variable)
    if not token:
        raise ValueError(
            f"token_variable is {variable!r}, which is not set in the environment of {process}: "
            "set it there, or leave token_variable out"
        )
    if not _TOKEN.fullmatch(token):
        # Refused here, since a later error could show the token.
        raise ValueError(
            f"token_variable is {variable!r}, whose value has a space, a line end or another "
            "character that no header takes: set it to the token alone"
        )
    return token
