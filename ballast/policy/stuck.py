"""Which request fails when none can go on, no policy helps, and nothing is on its way."""

from __future__ import annotations

from ballast.core.model import kv_room
from ballast.core.units import ceil_div
from ballast.core.view import DeviceView, ModelView, RequestView


def sacrifice(view: DeviceView) -> tuple[str, str]:
    """The id of the request that fails, and why it is this one.

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
            return r.id, f"it needs {needed} pages of KV cache, and alone it would have {room}"
    for _, r in reversed(requests[1:]):
        if r.pages or r.blocks:
            return r.id, "its pages serve requests that came before it"
    return requests[0][1].id, "no other request holds any"


def _pages_alone(m: ModelView, r: RequestView) -> int:
    """Pages of KV cache that the request needs in order to go on."""
    return ceil_div(ceil_div(r.tokens, m.spec.block_tokens), m.slab_blocks) * m.slab_pages


def _room_alone(view: DeviceView, m: ModelView) -> int:
    """Pages of KV cache that one request of `m` has with the device to itself."""
    there = [o.spec for o in view.models if o.spec.pinned or o is m]
    return kv_room(view.total - view.arena, there, view.page_bytes, m.limit)
