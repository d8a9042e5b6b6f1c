"""Build the `DeviceView` that memory policies read: a frozen snapshot of a device's state.

Used by `MemoryDecider`, by commands and by `return_borrowed`. Only models whose `version` has
changed are rebuilt; policies never see the state itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ballast.core.units import ceil_div
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
        arena=state.set_aside,
        free=state.pool.free,
        reclaiming=state.pool.ledger.reclaiming + deferred,
        promised=state.pool.ledger.promised - state.promises.pages,
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
        weights_in_place=state.weights_in_place,
    )


def made_anew(m: ModelState) -> ModelView:
    """Return a new snapshot of one model."""
    first = 0
    if m.waiting:
        tokens = m.spec.block_tokens if m.waiting.first.streams else len(m.waiting.first.tokens)
        first = m.kv.pages_for(ceil_div(tokens, m.spec.block_tokens))
    return ModelView(
        spec=m.spec,
        residency=m.residency,
        weight_pages=m.weights.pages,
        kv_pages=m.kv.pages,
        cached_pages=m.kv.cached_pages,
        cached_of=tuple(m.kv.cached_pages_of.items()),
        loose_pages=m.kv.loose_pages,
        limit=m.kv.limit,
        held=m.held,
        busy=m.job is not None,
        waiting=m.waiting.snapshot(m.spec),
        running=tuple(_running(m)),
        slab_pages=m.kv.layout.slab_pages,
        slab_blocks=m.kv.layout.blocks_per_slab,
        first_pages=first,
        last_used=m.last_used,
        costs=m.costs,
        shared=tuple(SharedView(s.owner, s.n_pages, s.staying) for s in m.weights.shared),
        cached_borrowed=m.kv.cached_borrowed_pages,
        rotatable=m.weights.slots.rotatable,
        layer_pages=m.weights.slots.layer_pages,
        layer_bytes=m.weights.slots.layer_bytes,
        decode_seconds=m.decode_seconds,
        prefill_seconds=m.prefill_seconds,
        kv_rotation=None if m.kv_stream is None else m.life.swap_to or m.kv.rotation,
        kv_swapping=m.life.swap_to is not None,
        kv_layer_pages=m.kv.layer_pages,
        staging=staging.view(m),
        first_cached_pages=_first_cached_pages(m),
        frozen=m.frozen,
        idle_since=m.idle_since,
        given_up=m.given_up,
        traffic=m.traffic,
        plan=m.plan,
        promoting=m.weights.promotion.pages,
    )


def deferred_pages(m: ModelState) -> int:
    """Return the pages that become free without further action when the model's job in flight and
    its loads have ended."""
    life = m.life
    if life.residency is Residency.EVICTING:
        return m.weights.leaving_pages + (m.kv.pages if m.weights.leaves_whole else 0)
    deferred = sum(m.kv.if_freed(r.blocks)[0] for r in m.running.leaving)
    if life.remap_to is not None:
        deferred += max(0, -m.pages_to_take)
    if m.weights.promotion.cancelled:
        deferred += m.weights.promotion.pages
    if life.swap_to is not None:
        deferred += max(0, life.swap_to.n_freed - m.kv.rotation.n_freed) * m.kv.layer_pages
    return deferred


def _first_cached_pages(m: ModelState) -> int:
    """Return the pages of the first waiting request's cached prefix; 0 unless it is short."""
    if not m.waiting or all(s.request_id != m.waiting.first.id for s in m.shortages):
        return 0
    return m.kv.prefix_pages(*m.waiting.first.prefix)


def _shortages(m: ModelState) -> Iterator[Shortage]:
    """Yield the model's shortages, reduced by blocks that have become free in slabs in use."""
    at_hand = m.kv.at_hand
    for s in m.shortages:
        blocks = max(0, s.wanted - at_hand)
        same = blocks == s.blocks
        yield s if same else replace(s, pages=m.kv.pages_for(s.wanted), blocks=blocks)


def _running(m: ModelState) -> Iterator[RequestView]:
    """Yield views of the running requests; kept fast, since there may be hundreds."""
    if_freed, leaving, slo_of = m.kv.if_freed, m.running.leaving, m.spec.slo_of
    for r in m.running:
        leaves = r.in_flight and r in leaving
        pages, blocks = (0, 0) if leaves else if_freed(r.blocks)
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
        )
