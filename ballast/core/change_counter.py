"""A counter by which a snapshot knows whether what it shows has changed since."""

from __future__ import annotations


class ChangeCounter:
    """Grows with every change. Whatever holds facts that one snapshot shows has one in common."""

    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0
