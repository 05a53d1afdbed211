"""Errors a user can act on: the field, its value, the rule it breaks and the way out.

Everything a user can get wrong raises a subclass of `LoadmasterError` (a `ValueError`); the command line
prints its message alone, on stderr, and exits with `exit_status`. Our own bugs are `assert`ions.
"""

from __future__ import annotations

__all__ = ["DoesNotFit", "InvalidInput", "LoadmasterError", "MissingDependency"]


class LoadmasterError(ValueError):
    """Base of every error meant for a user; `exit_status` is what the command line returns."""

    exit_status = 2


class InvalidInput(LoadmasterError):
    """A field holds a value that breaks a rule.

    Args:
        field: what the user wrote it under, e.g. ``layout.tp``.
        value: what was given.
        rule: what must hold.
        way_out: what to do instead.

    >>> print(InvalidInput("layout.tp", 8, "must divide 28 attention heads", "use 1, 2, 4, 7, 14 or 28"))
    layout.tp = 8: must divide 28 attention heads; use 1, 2, 4, 7, 14 or 28
    """

    def __init__(self, field: str, value: object, rule: str, way_out: str) -> None:
        self.field, self.value, self.rule, self.way_out = field, value, rule, way_out
        super().__init__(f"{field} = {value}: {rule}; {way_out}")

    def __reduce__(self) -> tuple[type[InvalidInput], tuple[str, object, str, str]]:
        return type(self), (self.field, self.value, self.rule, self.way_out)


class MissingDependency(LoadmasterError):
    """Something needs a package that is not installed (planning needs no torch, running does)."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(f"{what} needs {package}, which is not installed; pip install 'loadmaster[{extra}]'")


class DoesNotFit(LoadmasterError):
    """The answer is no: nothing in the space fits, or predicted and measured disagree. Exit status 1."""

    exit_status = 1
