"""How many random cases tests try: a few, the same each time, in `make test`; all in `make check`,
whose properties have more examples too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import settings

T = TypeVar("T")
LONG = settings.default.max_examples > 100
"""By the profile: other examples each time, and many of them."""


def some(of: Sequence[T], few: int) -> Sequence[T]:
    """Return all of them, or the first few. A test asks for so many that each way is taken."""
    return of if LONG else of[:few]


def tries(few: int, all: int) -> int:
    """Return how many examples of a property are tried that has numbers of its own."""
    return all if LONG else few
