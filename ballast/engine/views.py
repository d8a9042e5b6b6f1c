"""Build the `DeviceView` that memory policies read: a frozen snapshot of a device's state.

Used by `MemoryDecider`, by commands and by `return_borrowed`. Only models whose `version` has
changed are rebuilt; policies never see the state itself.

KV that is guaranteed to a model is no part of the pool that policies divide: it counts as set
aside, and of the model's own cache they see what is beyond it. So no policy can give it to others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ballast.core.view import (
    DeviceView,
    ModelView,
    RequestView,
    Residency,
    SharedView,
    Shortage,
)
from ballast.engine import staging
from ballast.engine.model import ModelState
from ballast.engine.state import DeviceState


def device_view(state: DeviceState) -> DeviceView:
    """Return a frozen snapshot of the device; only models that changed are rebuilt."""
    models = state.models.values()
    for m in models:
        if m.viewed != m.version.n:
            m.viewed, m.view, m.deferred = m.version.n, made_anew(m), deferred_pages(m)
    deferred = sum(m.deferred for m in models)
    deferred += sum(s.n_pages for s in state.shared if s.holders and not s.staying)
    return DeviceView(
        now=state.now,
        page_bytes=state.settings.page_bytes,
        total=state.pool.total,
        arena=state.set_aside + sum(m.kv.bounds.floor for m in models),
        free=state.pool.free,
        reclaiming=state.pool.ledger.reclaiming + deferred,
        promised=state.pool.ledger.reservations.promised
        - state.promises.pages
        + state.pool.ledger.reservations.kept,
        link_bytes_per_second=state.link_bytes_per_second,
        models=tuple(m.view for m in models),
        shortages=tuple(s for m in models if m.shortages for s in _shortages(m)),
        borrowed=state.lending.borrower.unused,
        lent=state.lending.standing(),
        recalled=state.lending.recalled,
        activation_bytes_per_second=state.activation_rate.bytes_per_second,
        lenders=state.lending.borrower.unused_of(),
        reads_host=state.pool.vm.maps_host,
        kv_fetch_bytes_per_second=state.tiers.bytes_per_second,
        near_host=not state.link.paced,
        weights_in_place=state.weights_in_place,
        peer_bytes_per_second=state.lending.bytes_per_second,
    )


def made_anew(m: ModelState) -> ModelView:
    """Return a new snapshot of one model."""
    first, floor, limit = 0, m.kv.bounds.floor, m.kv.bounds.limit
    if m.waiting:
        tokens = m.spec.block_tokens if m.waiting.first.streams else len(m.waiting.first.tokens)
        first = m.kv.counts.pages_for(m.spec.blocks_of(tokens))
    beyond = max(0, m.kv.pages - floor)
    return ModelView(
        spec=m.spec,
        residency=m.residency,
        weight_pages=m.weights.pages,
        kv_pages=beyond,
        cached_pages=min(m.kv.counts.cached_pages, beyond),
        cached_of=tuple(m.kv.counts.cached_pages_of.items()),
        cached_chances=m.kv.counts.cached_chances,
        loose_pages=min(m.kv.counts.loose_pages, beyond),
        limit=None if limit is None else max(0, limit - floor),
        held=m.held,
        busy=m.job is not None,
        waiting=m.waiting.snapshot(m.spec),
        running=tuple(_running(m)),
        slab_pages=m.kv.layout.slab_pages,
        slab_blocks=m.kv.layout.blocks_per_slab,
        first_pages=max(0, first - _kept(m)),
        last_used=m.last_used,
        costs=m.costs,
        shared=tuple(SharedView(s.owner, s.n_pages, s.staying) for s in m.weights.shared),
        cached_borrowed=m.kv.counts.cached_borrowed_pages,
        rotatable=m.weights.slots.rotatable,
        layer_pages=m.weights.slots.layer_pages,
        layer_bytes=m.weights.slots.layer_bytes,
        decode_seconds=m.decode_seconds,
        prefill_seconds=m.prefill_seconds,
        staging=staging.view(m),
        first_cached_pages=min(_first_cached_pages(m), beyond),
        frozen=m.frozen,
        idle_since=m.idle_since,
        given_up=m.given_up,
        traffic=m.traffic,
        plan=m.plan,
        guaranteed_pages=floor,
        kept_pages=m.weights.range.kept_pages,
        cap=None if m.kv.bounds.cap is None else max(0, m.kv.bounds.cap - floor),
        promoting=0 if m.weights.promotion.cancelled else m.weights.promotion.pages,
    )


def _kept(m: ModelState) -> int:
    """Return the pages that the model's KV lacks of those guaranteed to it: no policy need find
    them."""
    return max(0, m.kv.bounds.floor - m.kv.pages)


def deferred_pages(m: ModelState) -> int:
    """Return the pages that become free without further action when the model's job in flight and
    its loads have ended."""
    life = m.life
    if life.residency is Residency.EVICTING:
        return m.weights.leaving_pages + (m.kv.pages if m.weights.leaves_whole else 0)
    deferred = sum(m.kv.counts.if_freed(r.blocks)[0] for r in m.running.leaving)
    if life.remap_to is not None:
        deferred += max(0, -m.pages_to_take)
    if m.weights.promotion.cancelled:
        deferred += m.weights.promotion.pages
    return deferred + staging.pages_to_free(m)


def _first_cached_pages(m: ModelState) -> int:
    """Return the pages of the first waiting request's cached prefix; 0 unless it is short."""
    if not m.waiting or all(s.request_id != m.waiting.first.id for s in m.shortages):
        return 0
    return m.kv.prefixes.pages_of(*m.waiting.first.prefix)


def _shortages(m: ModelState) -> Iterator[Shortage]:
    """Yield the model's shortages, reduced by blocks that have become free in slabs in use."""
    slab = m.kv.layout.slab_pages
    slabs = _kept(m) // slab
    at_hand = m.kv.counts.at_hand + slabs * m.kv.layout.blocks_per_slab
    for s in m.shortages:
        blocks = max(0, s.wanted - at_hand)
        if blocks == s.blocks:
            yield s
        else:
            pages = max(0, m.kv.counts.pages_for(s.wanted) - slabs * slab)
            yield replace(s, pages=pages, blocks=blocks)


def _running(m: ModelState) -> Iterator[RequestView]:
    """Yield views of the running requests; kept fast, since there may be hundreds."""
    if_freed, leaving, slo_of = m.kv.counts.if_freed, m.running.leaving, m.spec.slo_of
    any_staged = bool(m.kv.staged.blocks)
    beyond = m.kv.pages - m.kv.bounds.floor if m.kv.bounds.floor else None
    for r in m.running:
        leaves = r.in_flight and r in leaving
        pages, blocks = (0, 0) if leaves else if_freed(r.blocks)
        if beyond is not None:
            pages = max(0, min(pages, beyond))
        submission, n, last, slo = r.submission, len(r.tokens), r.last_token_at, slo_of(r.adapter)
        arrival = submission.arrival
        yield RequestView(
            submission.id,
            r.order,
            n,
            r.computed,
            pages,
            r.in_flight,
            blocks,
            n - len(submission.prompt),
            submission.max_tokens,
            arrival + slo.ttft,
            slo.tpot,
            r.first_token_at,
            arrival if last is None else last,
            streams=r.streams,
            undone=r.undone,
            staged=sum(b < 0 for b in r.blocks) if any_staged else 0,
        )
