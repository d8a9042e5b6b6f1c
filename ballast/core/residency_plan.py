"""Plan where each unit of a model is, and compute the pages that it takes there.

A unit is a segment of weights: embeddings, each layer in order, what follows the layers.
`weights.residency` computes what is in force; policies choose other plans by `Reside`, and the
engine carries them out; what a change brings and gives up follows from the two plans
(`PlanChange`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from ballast.core.omitted import OMITTED, UNTOLD
from ballast.core.rotation import WHOLE, Rotation


class Unit(NamedTuple):
    """A segment of weights."""

    pages: int
    n_bytes: int
    shared: bool = False
    """Whether other models contain it: its pages are not the model's own, and it is given up only
    together with all others."""


class PlanChange(NamedTuple):
    """What it takes to get from one plan of a model to another."""

    coming: frozenset[int]
    """Units that are absent before, and not afterwards."""
    going: frozenset[int]
    """Units that are absent afterwards, and not before."""
    pages: int
    """Device pages that the model takes; negative: gives up."""


@dataclass(frozen=True)
class ResidencyPlan:
    """Places of all units of a model. Unit 0 is the embeddings, unit `i + 1` is layer `i`."""

    units: tuple[Unit, ...] = field(metadata=UNTOLD)
    n_layers: int = field(metadata=UNTOLD)
    rotation: Rotation = field(default=WHOLE, metadata=OMITTED)
    """Layers in slots."""
    absent: frozenset[int] = field(default=frozenset(), metadata=OMITTED)
    """Units that are on the host alone, and not read. While there are any, no layer is in a
    slot."""
    in_place: frozenset[int] = field(default=frozenset(), metadata=OMITTED)
    """Units that passes read in host memory (C2CServe, 5). While there are any, no layer is in a
    slot."""

    @property
    def runnable(self) -> bool:
        """Whether passes find all units, or have them brought."""
        return not self.absent

    @property
    def empty(self) -> bool:
        """Whether all units are absent."""
        return len(self.absent) == len(self.units)

    # -- what it costs ----------------------------------------------------------------------------

    @cached_property
    def device_pages(self) -> int:
        """Pages of the model's own units, and of its slots."""
        own = (u.pages for i, u in enumerate(self.units) if self._is_own(i))
        return sum(own) + self.slot_pages

    @property
    def slot_pages(self) -> int:
        """Pages of the slots."""
        return sum(self.units[1 + layer].pages for layer in self.rotation.first)

    @property
    def missing_pages(self) -> int:
        """Pages of the model's own units that are absent."""
        return sum(u.pages for i, u in enumerate(self.units) if i in self.absent and not u.shared)

    @cached_property
    def share_away(self) -> float:
        """Part of the bytes that passes read which have no pages; embeddings, of which a pass reads
        few rows, count where they are the head as well."""
        first = 0 if len(self.units) <= self.n_layers + 1 else 1
        whole = sum(unit.n_bytes for unit in self.units[first:])
        away = (i for i in self.in_place | self.absent if i >= first)
        return sum(self.units[i].n_bytes for i in away) / max(1, whole)

    def to(self, after: ResidencyPlan) -> PlanChange:
        """Return what it takes to get from this plan to `after`, of the same units."""
        pages = after.device_pages - self.device_pages
        return PlanChange(self.absent - after.absent, after.absent - self.absent, pages)

    # -- giving up and bringing back --------------------------------------------------------------

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Pages of what it gives up part by part, in that order: slots with all that is in them,
        then the model's own units, the last layers first, embeddings last."""
        slots = (self.slot_pages,) if self.rotation != WHOLE else ()
        return (*slots, *(self.units[i].pages for i in self._leaving()))

    def without(self, pages: int | None) -> ResidencyPlan:
        """Return the plan in which parts of at least so many pages are given up, in the order of
        `parts`; None: everything is. Everything includes shared units."""
        if pages is None:
            everything = frozenset(range(len(self.units)))
            return replace(self, rotation=WHOLE, absent=everything, in_place=frozenset())
        gone, freed = set(self.absent), 0
        if self.rotation != WHOLE and pages > 0:
            gone.update(1 + layer for layer in self.rotation.layers)
            freed = self.slot_pages
        for unit in self._leaving():
            if freed >= pages:
                break
            gone.add(unit)
            freed += self.units[unit].pages
        rotation = self.rotation if gone == self.absent else WHOLE
        return replace(self, rotation=rotation, absent=frozenset(gone))

    def whole(self) -> ResidencyPlan:
        """Return the plan in which each unit has pages of its own."""
        return replace(self, rotation=WHOLE, absent=frozenset(), in_place=frozenset())

    def completed(self, *, in_place: bool) -> ResidencyPlan:
        """Return the plan in which absent units are there too: read in place, or in pages."""
        read = self.in_place | self.absent if in_place else self.in_place
        return replace(self, rotation=WHOLE, absent=frozenset(), in_place=read)

    def turned(self, rotation: Rotation) -> ResidencyPlan:
        """Return the plan in which these layers of weights are in slots, and no others."""
        return replace(self, rotation=rotation)

    def reading(self, units: frozenset[int]) -> ResidencyPlan:
        """Return the plan in which passes read `units` in place, and no others."""
        rotation = WHOLE if units else self.rotation
        return replace(self, rotation=rotation, absent=self.absent - units, in_place=units)

    def laid(self, pages: int) -> ResidencyPlan:
        """Return the plan in which passes read own units of at least so many pages in place too, in
        the order of `parts`. No layer is in a slot."""
        read, freed = set(self.in_place), 0
        for unit in self._leaving():
            if freed >= pages:
                break
            read.add(unit)
            freed += self.units[unit].pages
        return replace(self, in_place=frozenset(read))

    def _is_own(self, unit: int) -> bool:
        """Whether the unit has pages of its own."""
        elsewhere = (
            unit in self.absent or unit in self.in_place or unit - 1 in self.rotation.slot_of
        )
        return not elsewhere and not self.units[unit].shared

    def _leaving(self) -> Iterator[int]:
        """Yield the units that it gives up part by part, in that order."""
        last = min(self.n_layers, len(self.units) - 1)
        after = range(len(self.units) - 1, last, -1)
        return (i for i in (*range(last, 0, -1), *after, 0) if self._is_own(i))


NOTHING = ResidencyPlan((), 0)
"""The plan of a model without units."""
