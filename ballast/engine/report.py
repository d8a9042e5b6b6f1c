"""Build the `DeviceReport` of a device, for routing and metrics, without stopping its loop.

Used by live devices and the simulator. Reads the state from any thread; changes nothing.
"""

from __future__ import annotations

from ballast.core.report import DeviceReport, GraphReport, ModelReport, StepTokens
from ballast.core.view import Residency
from ballast.engine.model import ModelState
from ballast.engine.state import DeviceState
from ballast.weights.weight_stream import Loads


def report(state: DeviceState, device: str, graphs: GraphReport | None = None) -> DeviceReport:
    """Return a report; safe from any thread. Each number is correct when read, but the numbers may
    be from different moments."""
    present = tuple(state.models.values())
    now = state.clock.now()
    models = tuple(_model(m, now) for m in present)
    owners = {state.arena.owner: state.arena.pages}
    if state.graphs.pages:
        owners[state.graphs.owner] = state.graphs.pages
    for s in state.shared:
        owners[s.owner] = len(s.pages)
    for m in present:
        slots = m.weights.slots.pages
        owners[m.weights.owner] = m.weights.present_pages - slots + m.weights.promotion.pages
        if slots:
            owners[m.weights.slots.owner] = slots
        owners[f"kv:{m.spec.name}"] = m.kv.pages
    owners |= {f"lent:{peer}": n for peer, n in state.lending.lent.items()}
    return DeviceReport(
        device=device,
        now=now,
        page_bytes=state.settings.page_bytes * state.settings.tensor_parallel,
        total=state.pool.total,
        free=state.pool.free,
        reclaiming=state.pool.ledger.reclaiming,
        owners=owners,
        models=models,
        jobs=state.jobs,
        draining=state.draining,
        borrowed=state.lending.borrowed,
        graphs=graphs,
        fetched_tokens={tier.value: n for tier, n in state.tiers.fetched_tokens.items()},
        prices=state.prices,
        activation_bytes_per_second=state.activation_rate.bytes_per_second
        or state.link_bytes_per_second,
    )


def _model(m: ModelState, now: float) -> ModelReport:
    layers, rotation = m.spec.n_layers, m.weights.slots.rotation
    rotated_pages = rotation.n_freed * m.weights.slots.layer_pages
    plan = m.weights.plan
    held = (s for s in m.weights.shared if m.spec.name in s.holders)
    absent = sum(1 + layer in plan.absent for layer in range(layers))
    in_place = sum(1 + layer in plan.in_place for layer in range(layers))
    here = m.residency is not Residency.ACTIVATING
    rotating = len(rotation.layers)
    # A request beyond `max_running`, or of a model that waits for its turn, lacks no pages.
    may_run = 0 if m.held else max(0, m.spec.max_running - len(m.running))
    lacking = tuple(m.waiting)[:may_run]
    loads = Loads() if m.weights.stream is None else m.weights.stream.loads
    return ModelReport(
        name=m.spec.name,
        residency=m.residency.value,
        weight_pages=plan.device_pages + m.weights.promotion.pages + sum(s.n_pages for s in held),
        whole_pages=m.weights.pages,
        kv_pages=m.kv.pages,
        cached_pages=m.kv.counts.cached_pages,
        cached_pages_of=dict(m.kv.counts.cached_pages_of),
        waiting=len(m.waiting),
        running=len(m.running),
        missed_blocks=m.kv.prefixes.missed_blocks,
        lacking=len(lacking),
        lacking_tokens=sum(len(r.tokens) for r in lacking),
        longest_tokens=m.longest.tokens(now),
        paused=len(m.paused),
        late=m.late(now),
        lane_seconds=m.lane_seconds,
        activations=m.activations,
        evictions=m.evictions,
        preemptions=m.preemptions,
        prompt_tokens=m.prompt_tokens,
        cached_tokens=m.cached_tokens,
        output_tokens=m.output_tokens,
        borrowed_pages=m.kv.borrowed.pages,
        staged_blocks=len(m.kv.staged),
        staged_bytes=len(m.kv.staged) * m.spec.block_bytes,
        layers=layers,
        resident_layers=layers - rotating - absent - in_place if here else 0,
        in_place_layers=in_place,
        rotating_layers=rotating,
        absent_layers=rotation.n_freed + absent if here else layers,
        lent_pages=rotated_pages,
        loads=loads.n,
        loaded_bytes=loads.n_bytes,
        copy_seconds=loads.copy_seconds,
        stall_seconds=loads.stall_seconds,
        steps=StepTokens(tuple(m.step_counts), m.step_tokens),
        set_aside=dict(m.quarantine.reasons),
        costs=m.costs,
        traffic=m.traffic.expected(now),
    )
