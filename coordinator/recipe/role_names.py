"""Names of roles and of their services.

Most roles have the name of their kind. Of several teachers each is a role, `teacher-NAME`, of the
kind `teacher`. A role with several services numbers them: rollout-0, teacher-math-1.
"""

from __future__ import annotations

import re

ROLES = ("actor", "critic", "reference", "teacher", "reward", "cost", "rollout")
"""Every kind of role; the algorithm says which it needs."""

_NUMBER = re.compile(r"-\d+$")


def service_names(role: str, number: int) -> tuple[str, ...]:
    """Names of a role's services: the role's own, or numbered ones where there are several."""
    return (role,) if number == 1 else tuple(f"{role}-{index}" for index in range(number))


def role_of(service: str) -> str:
    """The role that a service is one of."""
    return _NUMBER.sub("", service)


def kind_of(role: str) -> str:
    """What a role, or a service of it, is: the name of its program and of its certificate.

    Example: "teacher" of the role teacher-math.
    """
    return role.partition("-")[0]


def teacher_role(name: str) -> str:
    """The role of one of several teachers."""
    return f"teacher-{name}"


def field_of(role: str) -> str:
    """Where a role's section stands in a recipe: teacher.named.math of the role teacher-math."""
    return role.replace("-", ".named.", 1)
