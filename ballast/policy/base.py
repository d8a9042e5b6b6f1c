"""Define the protocols of policies: memory, admission and compute on a device, and the fleet.

Policies of `ballast.policy` implement them; `ballast.policy.presets` combines them. The engine loop
of a device (live and simulated) calls the first three, the fleet's controller the last. A policy is
a pure function of a view and a memo: it returns a decision, and changes nothing itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ballast.core.actions import Action, Decision
from ballast.core.compute import ComputeDecision, ComputeView
from ballast.core.fleet import FleetDecision, FleetView, Need, Room
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
    """Part of a preset. Equal views and memos give equal decisions."""

    __slots__ = ()

    @property
    def requires(self) -> Requirements:
        """What every device that it decides for must be able to do; by default nothing."""
        return Requirements()


class MemoryPolicy(Policy, ABC):
    """Memory and residency of one device. Everything that is decided about them is asked of it;
    what has a default here is decided alike under every policy that does not say otherwise."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, view: DeviceView, memo: object) -> Decision:
        """Decide. Asked on arrivals, finishes, shortages and timers, not on every step."""

    def expire(self, view: DeviceView) -> Expiry:
        """Evict models whose idle time to live is over; asked before each decision."""
        return expire(view)

    def when_stuck(self, view: DeviceView) -> Sequence[Action]:
        """Let requests go on that lack memory, when no decision helps, nothing runs and nothing is
        on its way: `Recall` what is lent, or fail one (`Refuse`). Where none of it can be done, or
        it has not helped many times, the answer that policies share is taken instead."""
        return last_resort(view)

    def bring_home(self, view: DeviceView, model: str, own: int, pages: int) -> Sequence[Action]:
        """Make room for a slab of a model's KV that leaves pages borrowed from another device:
        `own` pages of what the model itself holds, as its limit asks for, and as many more of
        anybody's as make up `pages` (either may be negative). Where the answer does not suffice,
        the youngest requests on that slab are preempted."""
        return caches_for(view, model, own, pages)

    def vacate(self, view: DeviceView, model: str, requests: Sequence[str]) -> Sequence[str]:
        """Return in which order running requests of a model, given oldest first, are preempted
        where no room was made for their slab by `bring_home`, until the slab is empty or what is
        left of it finds room. Those not named come after, youngest first."""
        return requests[::-1]

    def lend(self, view: DeviceView, to: str, pages: int) -> LendAnswer:
        """Make room for pages that an operator lends to another device, or refuse to. By default
        nothing makes way, and free pages are lent, all of them if it comes to that."""
        return LendAnswer()

    def grow_activations(self, view: DeviceView, pages: int) -> Sequence[Action]:
        """Make room for so many pages of activations more than are free, for a model that joins.
        The actions are done in order until there is room; where there is none after the last, the
        model is refused."""
        return caches_in_order(view, pages)


class AdmissionPolicy(Policy, ABC):
    """In which order waiting requests are admitted. That is not who comes first where work is
    undone: precedence stays with `Precedence`."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, view: DeviceView, memo: object) -> Decision:
        """Reorder queues (`Reorder`). Asked before the memory policy, which sees the new order."""


class ComputePolicy(Policy, ABC):
    """Which model's job runs next on an idle lane."""

    __slots__ = ()

    @property
    def in_turns(self) -> bool:
        """Whether models that only decode come in turns, the least recently run first, whatever is
        due: a simulation can then go through many steps without asking."""
        return False

    @abstractmethod
    def __call__(self, view: ComputeView, memo: object) -> ComputeDecision | None:
        """Decide. Asked when a lane is idle and a model could run.

        None: the lane stays idle until something happens, which a job in flight sees to: where none
        is, one must begin (BrokenPromise).
        """


class FleetPolicy(Policy, ABC):
    """Which devices serve which models, and which of a model's devices gets a request."""

    __slots__ = ()

    @property
    def moves(self) -> bool:
        """Whether it decides again after the start. If not it is never called, and only operators
        move models."""
        return False

    @property
    def replicates(self) -> bool:
        """Whether a model can come to have several devices, at the start or later."""
        return self.moves

    def place(self, needs: Sequence[Need], rooms: Sequence[Room]) -> dict[str, list[str]]:
        """Return, by model, its devices at the start. Raises ConfigError for a model that no device
        can serve."""
        return spread(needs, rooms)

    def route(self, replicas: Sequence[Replica]) -> str:
        """Return the name of the device that gets a request; there are several. They prefill: those
        that only decode are among them where there are no others."""
        return held_prefix(replicas)

    def decodes(self, replicas: Sequence[Replica]) -> str:
        """Return the name of the device at which a request goes on whose first token has come at
        one that only prefills; there is one or more, and they decode. Those that have the weights
        come first, unless they are busier than others."""
        able = near(replicas)
        return held_prefix([r for r in able if r.resident] or able)

    @abstractmethod
    def __call__(self, view: FleetView, memo: object) -> FleetDecision:
        """Decide. Asked first when the fleet has started, then when it wished to be."""
