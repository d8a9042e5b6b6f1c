"""A property that is computed once, when it is first read.

`functools.cached_property` without the lock that it takes until Python 3.12: that costs more than
many of the values which a decision needs. Used by views and by what policies derive from them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class lazy_property(Generic[T]):
    """Decorate a method without arguments; its instances need a `__dict__`."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        if instance is None:
            return self  # type: ignore[return-value]
        value: T = self._compute(instance)
        instance.__dict__[self._name] = value
        return value
