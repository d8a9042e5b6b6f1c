"""Reserve the bandwidth of a host link for the models that read their weights over it.

C2CServe, 6.2: a decoding model reads its weights once for each token, so that it needs
`weight bytes / TPOT` of the link; models can be active together while the sum is within the link.
Pure: fleet policies decide by it, live and in virtual time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


def link_demand(weight_bytes: float, tpot: float) -> float:
    """Return the bytes per second that a model needs to keep `tpot` seconds per token.

    `weight_bytes`: what a decode step reads over the link. Raises ValueError for a TPOT that is not
    above 0.
    """
    if tpot <= 0:
        raise ValueError(f"tpot is {tpot}; it is the seconds of a token, above 0")
    return weight_bytes / tpot


@dataclass(frozen=True, slots=True)
class LinkBudget:
    """A path over which several models read: its bandwidth, and what of it is reserved."""

    capacity: float
    """Bytes per second."""
    reserved: Mapping[str, float] = field(default_factory=dict)
    """Bytes per second, by model."""

    @property
    def demand(self) -> float:
        """Bytes per second of all reservations."""
        return sum(self.reserved.values())

    @property
    def free(self) -> float:
        """Bytes per second that are not reserved; negative: more is reserved than the path has."""
        return self.capacity - self.demand

    @property
    def valid(self) -> bool:
        """Whether all reservations can be kept at the same time."""
        return self.free >= 0

    def fits(self, model: str, demand: float) -> bool:
        """Whether a model's reservation, in place of one it has, leaves the budget valid."""
        return self.with_(model, demand).valid

    def with_(self, model: str, demand: float) -> LinkBudget:
        """Return the budget in which a model has this reservation, instead of another one."""
        return replace(self, reserved={**self.reserved, model: demand})

    def without(self, model: str) -> LinkBudget:
        """Return the budget in which a model has no reservation."""
        kept = {name: demand for name, demand in self.reserved.items() if name != model}
        return replace(self, reserved=kept)
