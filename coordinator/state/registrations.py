"""Places of services in the store: who has one, and until when."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Registration:
    """A service that has registered itself, at its place: a role with a number."""

    mesh: str
    """Mesh whose certificates it has (`Identity.mesh`)."""
    role: str
    number: int
    """Its number among the services of the role, from 0."""
    address: str
    """host:port at which others reach it."""
    incarnation: str
    """Random name of its process, 32 hexadecimal digits."""
    is_leaving: bool = False
    """Whether it drains, and takes no new work."""
    lease_until: float = 0.0
    """Unix time, seconds, at which the lease ends unless it is renewed. With each renewal another
    one, by the clock of the coordinator that entered it."""

    @property
    def place(self) -> str:
        """What one process at a time has."""
        return f"{self.role}/{self.number}"
