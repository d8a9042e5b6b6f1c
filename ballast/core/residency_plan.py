"""Plan where each unit of a model is, how a pass reads it, and what that costs.

A unit is a segment of weights: embeddings, each layer in order, what follows the layers. KV is
planned by layers. `weights.residency` computes what is in force; policies choose other plans by
`Reside`, and the engine carries them out; what a change brings, gives up and costs follows from the
two plans (`PlanChange`).
"""

from __future__ import annotations

import enum
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


class Site(enum.Enum):
    """Kind of place that a unit is in."""

    DEVICE = "device"
    """Pages of its own."""
    SLOT = "slot"
    """Pages that it shares with other layers, which take turns there."""
    HOST = "host"
    """None: its bytes are in host memory alone."""


class UnitPlace(NamedTuple):
    """UnitPlace of a unit."""

    site: Site
    slot: int = -1
    """Number of the slot; -1: it is in none."""


class Access(enum.Enum):
    """How a pass reads a unit."""

    RESIDENT = "resident"
    STREAMED = "streamed"
    """It is brought before its layer runs."""
    IN_PLACE = "in place"
    """It is read in host memory, over the link, by the addresses that it has on the device."""
    NONE = "none"
    """No pass can: the model does not run."""


class PlanChange(NamedTuple):
    """What it takes to get from one plan of a model to another."""

    coming: frozenset[int]
    """Units that are absent before, and not afterwards."""
    going: frozenset[int]
    """Units that are absent afterwards, and not before."""
    pages: int
    """Device pages that the model takes; negative: gives up."""
    n_bytes: int
    """Most bytes that are copied from the host before all is where it is to be: of units that come
    into pages, and of layers that leave slots."""
    calls: int
    """Units whose page-table entries change."""


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
    kv: Rotation = field(default=WHOLE, metadata=OMITTED)
    """Layers whose KV is on the host and passes through slots."""

    def place(self, unit: int) -> UnitPlace:
        """Return the place of a unit."""
        if unit in self.absent or unit in self.in_place:
            return UnitPlace(Site.HOST)
        slot = self.rotation.slot_of.get(unit - 1)
        return UnitPlace(Site.DEVICE) if slot is None else UnitPlace(Site.SLOT, slot)

    def access(self, unit: int) -> Access:
        """Return how passes read a unit. A layer that is alone in its slot stays there."""
        if self.absent:
            return Access.NONE
        if unit in self.in_place:
            return Access.IN_PLACE
        following = self.rotation.next_of.get(unit - 1, unit - 1)
        return Access.RESIDENT if following == unit - 1 else Access.STREAMED

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
    def bytes_per_pass(self) -> int:
        """Bytes that each pass reads over the link: of a dense model; of a layer with experts, at
        most."""
        over_link = (Access.STREAMED, Access.IN_PLACE)
        return sum(u.n_bytes for i, u in enumerate(self.units) if self.access(i) in over_link)

    def to(self, after: ResidencyPlan) -> PlanChange:
        """Return what it takes to get from this plan to `after`, of the same units."""
        changed = [i for i in range(len(self.units)) if self._mapped(i) != after._mapped(i)]
        copied = (i for i in changed if after.place(i).site is Site.DEVICE)
        return PlanChange(
            self.absent - after.absent,
            after.absent - self.absent,
            after.device_pages - self.device_pages,
            sum(self.units[i].n_bytes for i in copied),
            len(changed),
        )

    def _mapped(self, unit: int) -> tuple[UnitPlace, bool]:
        """What is mapped beneath a unit's addresses."""
        return self.place(unit), unit in self.in_place

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

    def _is_own(self, unit: int) -> bool:
        """Whether the unit has pages of its own."""
        return self.place(unit).site is Site.DEVICE and not self.units[unit].shared

    def _leaving(self) -> Iterator[int]:
        """Yield the units that it gives up part by part, in that order."""
        last = min(self.n_layers, len(self.units) - 1)
        after = range(len(self.units) - 1, last, -1)
        return (i for i in (*range(last, 0, -1), *after, 0) if self._is_own(i))


NOTHING = ResidencyPlan((), 0)
"""The plan of a model without units."""
