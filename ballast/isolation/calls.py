"""Define how functions on untrusted files are called: in this process, or in a limited child
process.

Code that reads checkpoints takes an `Isolation` as an argument: workers pass a `Zygote`, and `Here`
is the default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

A = TypeVar("A")
R = TypeVar("R")


class Isolation(Protocol):
    """Calls functions in isolation; implemented by `Here` and `ballast.isolation.zygote.Zygote`."""

    def call(self, function: Callable[[A], R], argument: A, result: type[R]) -> R:
        """Return `function(argument)`; `function` is module-level and raises no exception but
        BallastError.

        Raises that, and LimitExceeded where the function exceeded its limits.
        """


class Here:
    """Calls functions in this process, without limits."""

    def call(self, function: Callable[[A], R], argument: A, result: type[R]) -> R:
        return function(argument)
