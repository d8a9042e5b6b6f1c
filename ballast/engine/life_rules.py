"""Define the states and transitions of a model's life on one device, as a table.

Used by `ballast.engine.life`, which applies it. A model's life has five independent parts. `RULES`
gives, for each transition, the parts that it concerns and the states between which it moves them. A
part that a rule leaves out may be in any state, and keeps it.

===========  ==========================================  ===================================
part         states                                      subject
===========  ==========================================  ===================================
residency    absent, activating, resident, evicting,     the weights
             failed
early_start  none, allowed, broken                       jobs while the weights still arrive
work         idle, busy                                  the job in flight
layers       still, ordered, settling, draining loads    which layers rotate, or are read in place
stay         served, leaving, gone                       whether it belongs to the device
===========  ==========================================  ===================================
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, fields

from ballast.core.view import Residency


class EarlyStart(enum.Enum):
    """Whether a job of a model that is being activated may run."""

    NONE = "none"
    """Jobs wait for the whole load, or there is no load."""
    ALLOWED = "allowed"
    """A job may run; it waits for each layer that has not landed."""
    BROKEN = "broken"
    """The load has failed while a job is in flight, whose end is awaited."""


class Work(enum.Enum):
    """Whether a job of the model is in flight."""

    IDLE = "idle"
    BUSY = "busy"


class RemapPhase(enum.Enum):
    """Phase of a change of the layers that rotate, or are read in place."""

    STILL = "still"
    """No change is ordered."""
    ORDERED = "ordered"
    """A change is ordered; it waits for the end of the job in flight."""
    SETTLING = "settling"
    """A change is ordered; it waits for loads of layers to end (`RotationSettledEvent`)."""
    DRAINING_LOADS = "draining loads"
    """No change is ordered, but loads of layers are awaited (`RotationSettledEvent`)."""


class Membership(enum.Enum):
    """Whether the model belongs to the device."""

    SERVED = "served"
    LEAVING = "leaving"
    """It will leave; requests accepted before are still served, unless they are failed at once."""
    GONE = "gone"
    """It has left and its addresses are released; no transition is possible any more."""


class Step(enum.Enum):
    """Next step that the device must take for a model (`Life.due`)."""

    SETTLE = "settle"
    """Let the loads of layers end, and load no more."""
    EVICT = "evict"
    FAIL = "fail"
    """Its load has failed, and the job that waited for it has ended."""


class Transition(enum.Enum):
    """Transitions of a model's life."""

    ACTIVATE = "activate"
    ACTIVATE_SHARED = "activate shared"
    """Activation without a transfer: other models have loaded all of its weights."""
    REFILL = "refill"
    """One more transfer for segments that another model was to load and did not."""
    OPEN = "open"
    """Enough of its weights has landed for a job to begin."""
    LAND = "land"
    BREAK = "break"
    """Its load has failed while a job was in flight."""
    FAIL = "fail"
    STOP_LOAD = "stop load"
    """Order of an eviction while its weights are loading, which nobody waits for."""
    LOAD_STOPPED = "load stopped"
    ORDER_EVICTION = "order eviction"
    EVICT = "evict"
    BEGIN_JOB = "begin job"
    BEGIN_EARLY_JOB = "begin early job"
    """Begin of a job that waits for layers which are still loading."""
    END_JOB = "end job"
    ORDER_REMAP = "order remap"
    SETTLE = "settle"
    SETTLED = "settled"
    LEAVE = "leave"
    REMOVE = "remove"


_R, _A, _W, _L, _S = Residency, EarlyStart, Work, RemapPhase, Membership
_HERE = {_S.SERVED: _S.SERVED, _S.LEAVING: _S.LEAVING}
_IDLE = {_W.IDLE: _W.IDLE}
_RESIDENT = {_R.RESIDENT: _R.RESIDENT}
_ACTIVATING = {_R.ACTIVATING: _R.ACTIVATING}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One transition: old and new states of each part. None: any state, which stays."""

    residency: Mapping[Residency, Residency] | None = None
    early_start: Mapping[EarlyStart, EarlyStart] | None = None
    work: Mapping[Work, Work] | None = None
    layers: Mapping[RemapPhase, RemapPhase] | None = None
    stay: Mapping[Membership, Membership] | None = None


RULES: Mapping[Transition, Rule] = {
    Transition.ACTIVATE: Rule(residency={_R.ABSENT: _R.ACTIVATING}, stay=_HERE),
    Transition.ACTIVATE_SHARED: Rule(residency={_R.ABSENT: _R.RESIDENT}, stay=_HERE),
    Transition.REFILL: Rule(residency=_ACTIVATING, early_start={_A.NONE: _A.NONE}),
    Transition.OPEN: Rule(residency=_ACTIVATING, early_start={_A.NONE: _A.ALLOWED}),
    Transition.LAND: Rule(
        residency={_R.ACTIVATING: _R.RESIDENT},
        early_start={_A.NONE: _A.NONE, _A.ALLOWED: _A.NONE},
    ),
    Transition.BREAK: Rule(
        residency=_ACTIVATING, early_start={_A.ALLOWED: _A.BROKEN}, work={_W.BUSY: _W.BUSY}
    ),
    Transition.FAIL: Rule(
        residency={_R.ACTIVATING: _R.FAILED},
        early_start={_A.NONE: _A.NONE, _A.ALLOWED: _A.NONE, _A.BROKEN: _A.NONE},
        work=_IDLE,
    ),
    Transition.STOP_LOAD: Rule(
        residency={_R.ACTIVATING: _R.EVICTING},
        early_start={_A.NONE: _A.NONE, _A.ALLOWED: _A.NONE},
        work=_IDLE,
        stay=_HERE,
    ),
    Transition.LOAD_STOPPED: Rule(residency={_R.EVICTING: _R.EVICTING}, work=_IDLE),
    Transition.ORDER_EVICTION: Rule(
        residency={_R.RESIDENT: _R.EVICTING},
        layers={
            _L.STILL: _L.STILL,
            _L.ORDERED: _L.STILL,
            _L.SETTLING: _L.DRAINING_LOADS,
            _L.DRAINING_LOADS: _L.DRAINING_LOADS,
        },
        stay=_HERE,
    ),
    Transition.EVICT: Rule(
        residency={_R.EVICTING: _R.ABSENT},
        work=_IDLE,
        layers={_L.STILL: _L.STILL, _L.DRAINING_LOADS: _L.DRAINING_LOADS},
    ),
    Transition.BEGIN_JOB: Rule(
        residency=_RESIDENT,
        work={_W.IDLE: _W.BUSY},
        layers={_L.STILL: _L.STILL},
        stay=_HERE,
    ),
    Transition.BEGIN_EARLY_JOB: Rule(
        residency=_ACTIVATING,
        early_start={_A.ALLOWED: _A.ALLOWED},
        work={_W.IDLE: _W.BUSY},
        layers={_L.STILL: _L.STILL},
        stay=_HERE,
    ),
    Transition.END_JOB: Rule(work={_W.BUSY: _W.IDLE}),
    Transition.ORDER_REMAP: Rule(
        residency=_RESIDENT,
        layers={
            _L.STILL: _L.ORDERED,
            _L.ORDERED: _L.ORDERED,
            _L.SETTLING: _L.SETTLING,
            _L.DRAINING_LOADS: _L.SETTLING,
        },
        stay=_HERE,
    ),
    Transition.SETTLE: Rule(
        residency={_R.RESIDENT: _R.RESIDENT, _R.EVICTING: _R.EVICTING},
        work=_IDLE,
        layers={_L.STILL: _L.DRAINING_LOADS, _L.ORDERED: _L.SETTLING},
    ),
    Transition.SETTLED: Rule(layers={_L.SETTLING: _L.STILL, _L.DRAINING_LOADS: _L.STILL}),
    Transition.LEAVE: Rule(stay={_S.SERVED: _S.LEAVING}),
    Transition.REMOVE: Rule(
        residency={_R.ABSENT: _R.ABSENT, _R.RESIDENT: _R.ABSENT, _R.FAILED: _R.FAILED},
        work=_IDLE,
        layers={_L.STILL: _L.STILL},
        stay={_S.LEAVING: _S.GONE},
    ),
}
"""All legal transitions."""

NEWS = frozenset(
    {
        Transition.ACTIVATE_SHARED,
        Transition.REFILL,
        Transition.LAND,
        Transition.FAIL,
        Transition.EVICT,
        Transition.SETTLED,
        Transition.REMOVE,
    }
)
"""Transitions after which policies decide again: an action that they ordered has ended."""

PARTS = tuple(f.name for f in fields(Rule))
"""Names of the parts."""
MOVES = {
    t: tuple((p, moves) for p in PARTS if (moves := getattr(rule, p)) is not None)
    for t, rule in RULES.items()
}
"""The same as `RULES`, by transition: (part, from which states to which) of each part concerned."""
