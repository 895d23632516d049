"""Makes the environment that a recipe asks for."""

from __future__ import annotations

from collections.abc import Callable

from rolemesh.engine.environments.base import Environment
from rolemesh.engine.environments.calculator import CalculatorEnvironment
from rolemesh.engine.environments.confined import EnvironmentProcess
from rolemesh.engine.environments.reasoning_gym import ReasoningGymEnvironment
from rolemesh.engine.granted.user_code import UserCodeError, load_named
from rolemesh.engine.sandbox.host import Sandbox
from rolemesh.engine.specs import (
    CalculatorEnvironmentSpec,
    ReasoningGymEnvironmentSpec,
    TurnEnvironmentSpec,
)

EnvironmentMaker = Callable[[], Environment]
"""Makes a new environment for each trajectory."""


def environment_maker(
    spec: TurnEnvironmentSpec, sandbox: Sandbox | None = None
) -> EnvironmentMaker:
    """Returns the maker for a spec. A user's class is loaded and tried here, not later.

    Args:
        spec: Which environment.
        sandbox: Where a user's class runs, in a process of its own; None, or one that keeps
            nothing: in this process.

    Raises:
        UserCodeError: The class cannot be loaded, is no Environment, or does not take its config.
    """
    if isinstance(spec, ReasoningGymEnvironmentSpec):
        return ReasoningGymEnvironment
    if isinstance(spec, CalculatorEnvironmentSpec):
        return lambda: CalculatorEnvironment(spec)
    if sandbox is not None and sandbox.is_there:
        return EnvironmentProcess(spec, sandbox).make
    made_by = load_named(spec.environment, "environment.environment")
    if not (isinstance(made_by, type) and issubclass(made_by, Environment)):
        raise UserCodeError(
            f"environment.environment is {spec.environment!r}, which is no subclass of "
            "rolemesh.engine.environments.base.Environment: derive it from that class"
        )
    try:
        made_by(**spec.config)
    except Exception as error:
        # The user's code: it may raise anything.
        raise UserCodeError(
            f"environment.config is {spec.config}, and {spec.environment!r} cannot be made with it "
            f"({type(error).__name__}: {error}): give the arguments of the class"
        ) from error
    return lambda: made_by(**spec.config)
