"""The teacher: a frozen policy that scores what another one sampled, and says what it prefers."""

from rolemesh.engine.specs import TeacherSpec
from rolemesh.services.reference.servicers import FrozenPolicyRole


class TeacherRole(FrozenPolicyRole):
    """Holds the policy that the trained one is drawn to."""

    name = "teacher"
    spec_class = TeacherSpec
