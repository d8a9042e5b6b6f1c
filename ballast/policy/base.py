"""Define the protocols of policies: memory, admission and compute on a device, and the fleet.

Policies of `ballast.policy` implement them; `ballast.policy.presets` combines them. The engine loop
of a device (live and simulated) calls the first three, the fleet's controller the last. A policy is
a pure function of a view and a memo: it returns a decision, and changes nothing itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from ballast.core.actions import Action, Decision
from ballast.core.compute import ComputeDecision, ComputeView
from ballast.core.fleet import DeviceCapacity, FleetDecision, FleetView, ModelDemand
from ballast.core.price_curve import PriceCurve
from ballast.core.view import DeviceView
from ballast.policy.fleet.initial_placement import spread
from ballast.policy.fleet.replica_choice import Replica, held_prefix, near
from ballast.policy.memory.defaults import (
    Expiry,
    LendAnswer,
    caches_for,
    caches_in_order,
    expire,
    last_resort,
)
from ballast.policy.requirements import Requirements


class Policy:
    """A part of a preset. Equal views and memos give equal decisions."""

    __slots__ = ()

    @property
    def requires(self) -> Requirements:
        """Requirements that every device of the policy must meet; by default none."""
        return Requirements()


class MemoryPolicy(Policy, ABC):
    """Decides about memory and residency on one device. Methods with a default implementation
    decide alike under every policy that does not override them."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, view: DeviceView, memo: object) -> Decision:
        """Decide. Called on arrivals, finishes, shortages and timers, not on every step."""

    def expire(self, view: DeviceView) -> Expiry:
        """Evict models whose idle time to live is over, and those that are given up; called before
        each decision."""
        return expire(view)

    def when_stuck(self, view: DeviceView) -> Sequence[Action]:
        """Free memory for requests that cannot go on, when no decision helps, nothing runs and
        nothing is on its way: `Recall` lent pages, or fail a request (`Refuse`).

        If none of the actions can be applied, or they have not helped many times, the default is
        used.
        """
        return last_resort(view)

    def bring_home(self, view: DeviceView, model: str, own: int, pages: int) -> Sequence[Action]:
        """Make room for a slab of a model's KV that leaves pages borrowed from another device.

        Free `own` pages of the model's own, as its limit requires, and pages of any model to make
        up `pages` in all (either may be negative). If the answer does not suffice, the youngest
        requests on that slab are preempted.
        """
        return caches_for(view, model, own, pages)

    def vacate(self, view: DeviceView, model: str, requests: Sequence[str]) -> Sequence[str]:
        """Return the order in which running requests of a model are preempted if `bring_home` made
        no room for their slab, until the slab is empty or the rest of it finds room.

        `requests`: oldest first. Those that are not returned follow, youngest first.
        """
        return requests[::-1]

    def prices(self, view: DeviceView, memo: object) -> PriceCurve | None:
        """Return the device's curve of marginal prices, which fleet policies read that are
        `by_price`; None: it has none. `memo`: of the last decision."""
        return None

    def lend(self, view: DeviceView, to: str, pages: int) -> LendAnswer:
        """Make room for pages that an operator lends to another device, or refuse. By default
        nothing is freed, and free pages are lent, if need be all of them."""
        return LendAnswer()

    def grow_activations(self, view: DeviceView, pages: int) -> Sequence[Action]:
        """Make room for `pages` pages of activations beyond those free, for a model that joins.

        The actions are applied in order until there is room; if there is none after the last, the
        model is refused.
        """
        return caches_in_order(view, pages)


class PlacedModels(MemoryPolicy, ABC):
    """Memory policy under which models keep their places, whether requests wait for them or not."""

    __slots__ = ()

    def expire(self, view: DeviceView) -> Expiry:
        return expire(view, give_up=False)


class AdmissionPolicy(Policy, ABC):
    """Decides the order in which waiting requests are admitted. It does not decide which work is
    undone for which request: that is `Precedence`."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, view: DeviceView, memo: object) -> Decision:
        """Reorder queues (`Reorder`). Called before the memory policy, which sees the new order."""


class ComputePolicy(Policy, ABC):
    """Decides which model's job runs next on an idle lane."""

    __slots__ = ()

    @property
    def in_turns(self) -> bool:
        """Whether models that only decode take turns, the least recently run first, whatever is
        due: a simulation can then compute many steps without calling the policy."""
        return False

    @abstractmethod
    def __call__(self, view: ComputeView, memo: object) -> ComputeDecision | None:
        """Decide. Called when a lane is idle and a model could run.

        None: the lane stays idle until the next event. It is allowed only while a job is in flight,
        whose end is such an event; otherwise a job must begin (BrokenPromise).
        """


class FleetPolicy(Policy, ABC):
    """Decides which devices serve which models, which of a model's devices gets a request, and
    which devices lend pages to which."""

    __slots__ = ()

    options: ClassVar[tuple[str, ...]] = ()
    """Fields of the policy, a dataclass, that are options of presets with it."""

    @property
    def lends(self) -> bool:
        """Whether it may have devices lend pages to each other."""
        return False

    @property
    def by_price(self) -> bool:
        """Whether it reads the devices' curves of marginal prices (`MemoryPolicy.prices`)."""
        return False

    @property
    def moves(self) -> bool:
        """Whether it places models after the start. If not, only operators move models."""
        return False

    @property
    def decides(self) -> bool:
        """Whether it decides again after the start. If not, it is never called."""
        return self.moves or self.lends

    @property
    def replicates(self) -> bool:
        """Whether a model may get several devices, at the start or later."""
        return self.moves

    def place(
        self, needs: Sequence[ModelDemand], rooms: Sequence[DeviceCapacity]
    ) -> dict[str, list[str]]:
        """Return the devices of each model at the start. Raises ConfigError for a model that no
        device can serve."""
        return spread(needs, rooms)

    def route(self, replicas: Sequence[Replica]) -> str:
        """Return the name of the device that gets a new request, of several. All of them prefill;
        devices that only decode are given if there are no others."""
        return held_prefix(replicas)

    def decodes(self, replicas: Sequence[Replica]) -> str:
        """Return the name of the device where a request goes on whose first token was computed at a
        device that only prefills.

        `replicas`: one or more that decode. Those with the weights resident come first, unless they
        are busier than others.
        """
        able = near(replicas)
        return held_prefix([r for r in able if r.resident] or able)

    @abstractmethod
    def __call__(self, view: FleetView, memo: object) -> FleetDecision:
        """Decide. Called first when the fleet has started, then at the times that its decisions
        state."""
