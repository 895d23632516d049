"""Functions of the user that stand for losses and estimators: loaded once, called with checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rolemesh.engine.granted.user_code import UserCodeError, load_named, raised_at
from rolemesh.engine.specs import OwnFunctionSpec

_USER_ERRORS = (Exception, SystemExit)
"""What a user's code may raise. SystemExit would end the service without a word."""


class OwnFunction:
    """One function with its config."""

    def __init__(self, function: Callable[..., Any], spec: OwnFunctionSpec, field: str) -> None:
        """Tries the config against the parameters of the function.

        Args:
            function: Takes what it is to work on, and the config by keyword.
            spec: Its name and config.
            field: Of the recipe, for messages.

        Raises:
            UserCodeError: It cannot be called so.
        """
        self._function, self._config = function, dict(spec.config)
        self.name = spec.function
        if not callable(function):
            raise UserCodeError(
                f"{field}.function is {self.name!r}, which is no function but a "
                f"{type(function).__name__}: name another"
            )
        code = getattr(inspect.unwrap(function), "__code__", None)
        self.place = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
        """Where it stands, as " (FILE:LINE)"; empty where that is not known."""
        try:
            inspect.signature(function).bind(None, **self._config)
        except (TypeError, ValueError) as error:
            raise UserCodeError(
                f"{field}.config is {self._config}, and {self.name!r}{self.place} cannot be called "
                f"with it ({error}): it takes one positional argument, and the config by keyword"
            ) from error

    def __call__(self, given: Any) -> Any:
        """What the function answers; raises UserCodeError with file and line for what it raises."""
        try:
            return self._function(given, **self._config)
        except _USER_ERRORS as error:
            raise UserCodeError(
                f"{self.name!r} failed: {type(error).__name__}: {error}{raised_at(error)}"
            ) from error

    def wrong(self, what: str) -> UserCodeError:
        """The error for an answer that cannot be used; `what` says what it is, and the remedy."""
        return UserCodeError(f"{self.name!r}{self.place} gave {what}")

    def fields(self, answer: Any, main: str, others: tuple[str, ...]) -> dict[str, Any]:
        """An answer by names: a mapping as it is, anything else as the main one.

        Raises:
            UserCodeError: A mapping lacks the main one, or has names that mean nothing.
        """
        if not isinstance(answer, Mapping):
            return {main: answer}
        unknown = [name for name in answer if name not in (main, *others)]
        if main not in answer or unknown:
            raise self.wrong(
                f"a mapping with {list(answer)}: give {main!r}, and no more than "
                f"{', '.join(map(repr, others))} besides"
            )
        return dict(answer)


class OwnFunctions:
    """The functions that a service loaded at its start. No other code is ever run for a call."""

    def __init__(self, named: Mapping[str, OwnFunctionSpec] | None = None) -> None:
        """Loads each, and tries its config.

        Args:
            named: By the field of the recipe that names it.

        Raises:
            UserCodeError: One cannot be loaded or called.
        """
        self._loaded: dict[str, Callable[..., Any]] = {}
        for field, spec in (named or {}).items():
            if spec.function not in self._loaded:
                self._loaded[spec.function] = load_named(spec.function, f"{field}.function")
            OwnFunction(self._loaded[spec.function], spec, field)

    def of(self, spec: OwnFunctionSpec) -> OwnFunction:
        """The function of a part of an algorithm.

        Raises:
            UserCodeError: It was not loaded at the start, or does not take this config.
        """
        if spec.function not in self._loaded:
            known = ", ".join(map(repr, self._loaded)) or "none"
            raise UserCodeError(
                f"function is {spec.function!r}, which this service has not loaded: name it in "
                f"own_functions of Initialize, since code is loaded then alone (loaded: {known})"
            )
        return OwnFunction(self._loaded[spec.function], spec, type(spec).__name__)
