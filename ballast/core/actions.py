"""What a policy may ask for, and how shortage is said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ballast.core.rotation import Rotation
from ballast.core.settings import Slo

OMITTED: Mapping[str, Any] = {"omitted": True}
"""Metadata of a field that stories leave out while it has its default: stories recorded before the
field existed compare equal."""


@dataclass(frozen=True, slots=True)
class Short:
    """Not enough pages: a result, never an exception. `pages` are missing."""

    pages: int
    blocks: int = 0
    """Of a KV cache: the blocks for which it needs those pages. Any that its own requests give
    back will do as well."""


@dataclass(frozen=True, slots=True)
class Activate:
    """Bring a model's weights onto the device."""

    model: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Evict:
    """Take a model's weights and KV off the device; its running requests are preempted."""

    model: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Preempt:
    """Take a running request's blocks; it waits again and is recomputed when re-admitted."""

    model: str
    request_id: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class DropCache:
    """Forget cached prefixes of a model, least recently used first, until `pages` are free."""

    model: str
    pages: int
    why: str = ""
    spare: str = field(default="", metadata=OMITTED)
    """Id of a waiting request of the model, whose cached prefix stays."""


@dataclass(frozen=True, slots=True)
class Compact:
    """Move a model's blocks together so that whole pages become free."""

    model: str
    pages: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class Limit:
    """Bound a model's KV to `pages` (None: no bound). Growth beyond it is `Short`."""

    model: str
    pages: int | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Hold:
    """While `held`, a model's waiting requests are not admitted; its running ones go on.

    While `frozen`, no job of the model starts: running requests stand still and keep their KV.
    Only a job that moves KV between device and host still runs.
    """

    model: str
    held: bool
    why: str = ""
    frozen: bool = False


@dataclass(frozen=True, slots=True)
class Reorder:
    """Give waiting requests of a model another place in its queue: among requests of one priority
    those with a lower `place` are admitted first, and of one place those that arrived first.

    A place is 0 unless given. Who may undo whose work does not depend on it.
    """

    model: str
    requests: tuple[str, ...]
    """Their ids."""
    place: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Fail a waiting request that this policy will never serve."""

    model: str
    request_id: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Remap:
    """Let layers of a resident model rotate from now on, and no others (`WHOLE`: none).

    A job in flight ends first. What it takes more of memory than before is set aside at once.
    """

    model: str
    rotation: Rotation
    why: str = ""


@dataclass(frozen=True, slots=True)
class SwapKv:
    """Let the KV of these layers rotate from now on, and that of no others (`WHOLE`: none).

    It is on the host but for the layer that is run, and those beside it. A job in flight ends
    first; either more layers rotate than before, or fewer.
    """

    model: str
    rotation: Rotation
    why: str = ""


RECALL_SECONDS = 30.0
"""For a borrower to return pages, where nobody says otherwise."""


@dataclass(frozen=True, slots=True)
class Recall:
    """Ask pages back that were lent to another device, the last ones first."""

    to: str
    pages: int | None
    """None: all."""
    seconds: float
    """After which the other device's process is killed if it has not returned them."""
    why: str = ""


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Return pages that were borrowed from another device, of those that nothing lies on, before
    they are asked back."""

    to: str
    pages: int
    why: str = ""


ModelAction = (
    Activate
    | Evict
    | Preempt
    | DropCache
    | Compact
    | Limit
    | Hold
    | Reorder
    | Refuse
    | Remap
    | SwapKv
)
Action = ModelAction | Recall | GiveBack


@dataclass(frozen=True, slots=True)
class Promise:
    """Free pages set aside for a model, so that no other one takes what was freed for its claim.

    Pages that are not free yet are set aside as they become free. Promises hold until the policy's
    next decision, which states them anew; earlier ones are filled first.
    """

    model: str
    weights: int
    """Pages for its weights; void once these are on the device."""
    kv: int
    """Pages for its KV cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """New service levels and bounds of a model, or of an adapter; they count from now on."""

    model: str
    slo: Slo
    priority: int
    max_waiting: int
    queue_seconds: float | None
    share: float = 1.0
    """This and what follows: of a model only, an adapter has its base's."""
    max_running: int = 64
    pinned: bool = False
    ttl: float | None = field(default=None, metadata=OMITTED)
    """Seconds; None, 0: idle, it stays."""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Join:
    """A model that has been made ready is of the device from now on."""

    model: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Leave:
    """No new requests for a model; when those open have ended it goes, for good."""

    model: str
    at_once: bool = False
    """What is open fails instead of ending."""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Lend:
    """Lend free pages to another device."""

    to: str
    pages: int
    why: str = ""


LoopCommand = Activate | Evict | Change | Join | Leave | Lend | Recall
"""What only operators may ask for, and what they may beside policies."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A policy's answer: what to do, what to remember, when to ask again (None: on events)."""

    actions: tuple[Action, ...] = ()
    memo: object = None
    wake_at: float | None = None
    promises: tuple[Promise, ...] = ()
    """Pages set aside from now on, in order of precedence; none of those before."""
    while_short: bool = False
    """It holds only as long as requests lack the pages that they lack now: the policy is asked
    again when one of them has found some."""
