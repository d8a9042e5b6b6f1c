"""Define the actions that policies and operators may request, `Decision`, and the result `Short`.

Policies return actions; the engine (`engine.apply`) carries them out or refuses them with a reason.
Nothing here acts: all are frozen data. `why` is the reason that the story records.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ballast.core.fleet_state import Command, CommandOutcome
from ballast.core.levels import ModelLevels, at_levels, level_fields
from ballast.core.omitted import OMITTED
from ballast.core.order import Fleet, ModelOrder, Order, SendCommand, Steps, refused
from ballast.core.residency_plan import ResidencyPlan
from ballast.core.settings import AdapterSettings, FleetSettings, ModelSettings

if TYPE_CHECKING:
    from collections import UserString

    Why = str | UserString
else:
    Why = str  # of actions in messages, whose reasons are plain texts
"""A reason, which may be a text that is made when it is first read."""


@dataclass(frozen=True, slots=True)
class Short:
    """Result (never an exception) of an allocation that lacks pages: `pages` are missing."""

    pages: int
    blocks: int = 0
    """KV blocks for which the pages are missing; blocks that the model's own requests free serve
    as well."""


@dataclass(frozen=True, slots=True)
class Preempt:
    """Take a running request's blocks; it waits again and is recomputed when re-admitted."""

    model: str
    request_id: str
    why: Why = ""


@dataclass(frozen=True, slots=True)
class DropCache:
    """Drop cached prefixes of a model, least recently used first, until `pages` are free."""

    model: str
    pages: int
    why: Why = ""
    spare: str = field(default="", metadata=OMITTED)
    """Id of a waiting request of the model whose cached prefix is kept."""


@dataclass(frozen=True, slots=True)
class Compact:
    """Move a model's KV blocks together so that `pages` whole pages become free."""

    model: str
    pages: int
    why: Why = ""


@dataclass(frozen=True, slots=True)
class Limit:
    """Bound a model's KV cache to `pages` (None: no bound); growth beyond it is `Short`."""

    model: str
    pages: int | None
    why: Why = ""


@dataclass(frozen=True, slots=True)
class Hold:
    """Stop or resume the admission of a model's requests.

    While `held`, waiting requests are not admitted; running ones go on. While `frozen`, no job of
    the model starts, except one that moves KV between device and host; running requests keep their
    KV.
    """

    model: str
    held: bool
    why: Why = ""
    frozen: bool = False


@dataclass(frozen=True, slots=True)
class Reorder:
    """Give waiting requests of a model another `place` in its queue.

    Requests are admitted by priority, then by lower place (default 0), then by arrival. Precedence
    in preemption does not depend on the place.
    """

    model: str
    requests: tuple[str, ...]
    """Ids of the requests."""
    place: int
    why: Why = ""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Fail a waiting request that this policy will never serve."""

    model: str
    request_id: str
    why: Why = ""


@dataclass(frozen=True, slots=True)
class Reside:
    """Have a model's weights and KV where `plan` has them, from between two passes on.

    Carried out whole or refused. A job in flight ends first; pages that the plan takes are set
    aside at once. Units come (activation), or go (eviction, in part or whole), which preempts
    running requests; or, where all are there, other layers of weights, of KV, or of both, get slots
    (remap). With part of its weights a model does not run, and keeps cached prefixes; without any
    it keeps no KV. Layers whose KV gets slots contain those before, or are contained in them.
    """

    model: str
    plan: ResidencyPlan
    why: Why = ""


@dataclass(frozen=True, slots=True)
class Stage:
    """Have `staged` of the KV blocks that a model's running requests use on the host.

    They are copied beside the next job and read through slots from then on: each job brings them
    layer by layer. Fewer than now: some come home.
    """

    model: str
    staged: int
    why: Why = ""
    order: tuple[str, ...] = field(default=(), metadata=OMITTED)
    """Requests in the order in which their blocks move. The others follow: to the host the
    youngest first, home the oldest first."""


RECALL_SECONDS = 30.0
"""Default time for a borrower to return recalled pages."""


@dataclass(frozen=True, slots=True)
class Recall(Command):
    """Recall pages lent to another device, the most recently lent first."""

    to: str
    pages: int | None
    """Number of pages; None: all."""
    seconds: float
    """Time after which the borrower's process is killed if it has not returned them."""
    why: Why = ""


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Return unused pages borrowed from another device, before they are recalled."""

    to: str
    pages: int
    why: Why = ""


ModelAction = Preempt | DropCache | Compact | Limit | Hold | Reorder | Refuse | Reside | Stage
Action = ModelAction | Recall | GiveBack


def explained(action: Action, why: Why) -> Action:
    """Give an action that nobody else has yet another reason, and return it: cheaper than a copy,
    where a decision has many."""
    object.__setattr__(action, "why", why)
    return action


@dataclass(frozen=True, slots=True)
class Promise:
    """Reserve free pages for a model, so that no other takes the pages freed for its claim.

    Pages that are not free yet are reserved as they become free. Promises hold until the policy's
    next decision, which restates them; earlier ones in its list are filled first.
    """

    model: str
    weights: int
    """Pages for the model's weights; void once these are on the device."""
    kv: int
    """Pages for the model's KV cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change(ModelLevels, ModelOrder):
    """Replace the levels of a model or adapter, from now on."""

    model: str
    ttl: float | None = field(default=None, metadata=OMITTED)
    guarantee: int = field(default=0, metadata=OMITTED)
    limit: int | None = field(default=None, metadata=OMITTED)
    why: str = ""

    @classmethod
    def to(cls, model: ModelSettings | AdapterSettings) -> Change:
        """Return the order after which a model or adapter serves at the levels of its settings."""
        return cls(model=model.name, why="by an operator", **level_fields(model))

    def undoing(self, fleet: FleetSettings) -> Change | None:
        found = fleet.named(self.model)
        return None if found is None else Change.to(found)

    def applied(self, fleet: FleetSettings) -> FleetSettings:
        return replace(fleet, models=tuple(map(self._changed, fleet.models)))

    def _changed(self, model: ModelSettings) -> ModelSettings:
        if model.name == self.model:
            return at_levels(model, self)
        mine = (at_levels(a, self) if a.name == self.model else a for a in model.adapters)
        return replace(model, adapters=tuple(mine))


@dataclass(frozen=True, slots=True)
class Join:
    """Add a model that has been loaded into host memory to the device's served models."""

    model: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Leave:
    """Refuse new requests of a model, and remove it for good when its open requests have ended."""

    model: str
    at_once: bool = False
    """Whether open requests fail now instead of running to their end."""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Lend(Command):
    """Lend free pages to another device."""

    to: str
    pages: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class ScrubKv(Command):
    """Forget the cached prefixes of a model, of a tenant, or of both together; None: of all. Blocks
    of running requests stay until these have ended."""

    model: str | None = None
    tenant: str | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class ReleaseMemory(Command, Order):
    """Give the memory of free pages but `kept_bytes` back to the machine. No more of them are
    populated ahead of need, until the next such order or another worker.

    Simulated pages have no memory: a simulation records it.
    """

    kept_bytes: int = 0
    why: str = ""

    @property
    def verb(self) -> str:
        return "release"

    def refusal(self, fleet: FleetSettings, served: Collection[str]) -> str | None:
        ranks = fleet.device.tensor_parallel
        return None if ranks == 1 else f"its {ranks} ranks keep their memory"

    def steps(self, fleet: Fleet, device: str | None = None) -> Steps:
        if device is None or device not in fleet:
            return refused(f"no device {device!r}; devices: {', '.join(fleet)}")
        objection = self.refusal(fleet[device].fleet, fleet[device].specs)
        if objection is not None:
            return refused(objection)
        outcome: CommandOutcome = yield SendCommand(device, self)
        return outcome


@dataclass(frozen=True, slots=True)
class ActivateCommand(ModelOrder):
    """Bring all of a model's weights that the device lacks, as its preset has them there."""

    model: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class EvictCommand(ModelOrder):
    """Take a model's weights off the device, or part of them."""

    model: str
    why: str = ""
    pages: int | None = field(default=None, metadata=OMITTED)
    """Pages to free, in whole segments, the last layers first; None: those of all segments."""


MemoryCommand = Lend | Recall | ReleaseMemory | ScrubKv
"""Commands about no single model."""
LoopCommand = ActivateCommand | EvictCommand | Change | Join | Leave | MemoryCommand
"""Commands that operators may give the loop; some of them are also actions of policies."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A memory policy's result: actions, its memo, and when to call it again (None: on events)."""

    actions: tuple[Action, ...] = ()
    memo: object = None
    wake_at: float | None = None
    promises: tuple[Promise, ...] = ()
    """Pages to reserve from now on, in order of precedence; replaces all earlier promises."""
    while_short: bool = False
    """Whether the decision depends on the present shortages: the policy is called again when a
    request that lacks pages has found some."""
