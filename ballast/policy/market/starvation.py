"""Find the models that starve: they run nothing, and their requests have waited for long.

Memory policies serve such models whatever rule they go by else, so that none is pathological.
"""

from __future__ import annotations

import math

from ballast.core.view import DeviceView, ModelView

LONGEST_WAIT = 10.0
"""Most seconds that a TTFT service level counts for when claims are ordered; a model that waits for
longer starves."""


def starving(view: DeviceView, m: ModelView) -> bool:
    """Whether a model runs nothing, and none of its requests got a token for `LONGEST_WAIT`."""
    return view.now >= m.derived(last_served) + LONGEST_WAIT


def owes_first_token(view: DeviceView, m: ModelView) -> bool:
    """Whether a model starves one of whose requests has had no token for `LONGEST_WAIT`: it comes
    before all work of others but the first of all."""
    return view.now >= owes_at(m)


def owes_at(m: ModelView) -> float:
    """Return when a model will owe a first token, if nothing is done until then; inf: it runs, or
    all of its requests have had one."""
    return max(m.derived(last_served), m.derived(unserved_since)) + LONGEST_WAIT


def serves_owed(view: DeviceView, m: ModelView) -> bool:
    """Whether a model runs requests none of which has had a token, one for `LONGEST_WAIT`: what it
    came for is still to be done."""
    if any(r.first is not None for r in m.running):
        return False
    since = min((r.last for r in m.running), default=math.inf)
    return view.now >= since + LONGEST_WAIT


def next_owed(view: DeviceView) -> float | None:
    """Return when the next model will owe a first token; None: none will."""
    later = (at for m in view.models if (at := owes_at(m)) > view.now)
    at = min(later, default=math.inf)
    return at if at < math.inf else None


def last_served(m: ModelView) -> float:
    """Return when a request of a model that runs nothing last got a token, or, if none has, when
    the first of them came; inf: the model runs, or has no request.

    Admission puts requests that can be in time first, so that the first of a queue may have come
    just now however long others have waited.
    """
    if m.running or not m.waiting:
        return math.inf
    served = (r.last for r in m.waiting if r.first is not None)
    return max(served, default=m.derived(unserved_since))


def unserved_since(m: ModelView) -> float:
    """Return when the first of a model's requests without a token came, waiting and running ones;
    inf: all have had one."""
    return min((r.last for r in (*m.running, *m.waiting) if r.first is None), default=math.inf)
