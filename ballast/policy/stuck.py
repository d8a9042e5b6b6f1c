"""What is done when no request can go on, no decision helps, and nothing is on its way."""

from __future__ import annotations

from collections.abc import Sequence

from ballast.core.actions import RECALL_SECONDS, Action, Recall, Refuse
from ballast.core.model import kv_room
from ballast.core.units import ceil_div
from ballast.core.view import DeviceView, ModelView, RequestView


def last_resort(view: DeviceView) -> Sequence[Action]:
    """Recall all that is lent to other devices; where nothing is, fail one request."""
    if view.lent:
        why = "requests find no memory"
        return [Recall(device, None, RECALL_SECONDS, why) for device, _ in view.lent]
    m, r, why = sacrifice(view)
    return [Refuse(m.name, r.id, why)]


def sacrifice(view: DeviceView) -> tuple[ModelView, RequestView, str]:
    """The request that fails, with its model, and why it is this one.

    First one that the device could not serve alone, whatever the others give up: the oldest of
    these. Else, as the oldest of all is never undone, the newest other one that holds pages, whose
    pages serve those before it. Else the oldest: nobody holds pages, and it was not served. The
    view must have a request.
    """
    requests = sorted(
        ((m, r) for m in view.models for r in (*m.running, *m.waiting)), key=lambda mr: mr[1].order
    )
    for m, r in requests:
        needed, room = _pages_alone(m, r), _room_alone(view, m)
        if needed > room:
            return m, r, f"it needs {needed} pages of KV cache, and alone it would have {room}"
    for m, r in reversed(requests[1:]):
        if r.pages or r.blocks:
            return m, r, "its pages serve requests that came before it"
    m, r = requests[0]
    return m, r, "no other request holds any"


def _pages_alone(m: ModelView, r: RequestView) -> int:
    """Pages of KV cache that the request needs in order to go on."""
    return ceil_div(ceil_div(r.tokens, m.spec.block_tokens), m.slab_blocks) * m.slab_pages


def _room_alone(view: DeviceView, m: ModelView) -> int:
    """Pages of KV cache that one request of `m` has with the device to itself."""
    there = [o.spec for o in view.models if o.spec.pinned or o is m]
    return kv_room(view.total - view.arena, there, view.page_bytes, m.limit)
