"""What a device answers that is ordered to lend pages to another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ballast.core.actions import Action


@dataclass(frozen=True, slots=True)
class LendAnswer:
    """Lending takes free pages only: those that are free once the `actions` have been done. It is
    refused where these are too few, or for the reason that `refusal` states."""

    actions: Sequence[Action] = ()
    refusal: str | None = None
