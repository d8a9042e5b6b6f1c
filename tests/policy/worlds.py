"""Views made by hand, for tests of policies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ballast.core.actions import Action, Reside
from ballast.core.cost import UNMEASURED
from ballast.core.model import ModelSpec
from ballast.core.request import Precedence
from ballast.core.residency_plan import ResidencyPlan, Unit
from ballast.core.rotation import WHOLE, Rotation
from ballast.core.settings import Slo
from ballast.core.view import (
    DeviceView,
    ModelView,
    RequestView,
    Residency,
    SharedView,
    Shortage,
)

PAGE = 65536


def spec(
    name: str = "m", *, pages: int = 10, share: float = 1.0, pinned: bool = False
) -> ModelSpec:
    """A small model whose weights take `pages` pages."""
    return ModelSpec(
        name=name,
        n_layers=2,
        n_heads=4,
        kv_heads=2,
        head_dim=32,
        hidden=128,
        intermediate=256,
        vocab=512,
        dtype="float32",
        max_model_len=512,
        block_tokens=16,
        segment_bytes=(pages * PAGE,),
        fingerprint=name,
        slo=Slo(ttft=1.0, tpot=0.1),
        share=share,
        pinned=pinned,
    )


def request(
    sequence: int,
    *,
    arrival: float = 0.0,
    pages: int = 0,
    blocks: int = 0,
    tokens: int = 32,
    flying: bool = False,
    generated: int = 0,
    max_tokens: int = 512,
) -> RequestView:
    """A request that has its first token in time if it has any."""
    slo = spec().slo
    return RequestView(
        f"r{sequence}",
        Precedence(0, arrival, sequence),
        tokens,
        tokens - 1,
        pages,
        flying,
        blocks,
        generated,
        max_tokens,
        due=arrival + slo.ttft,
        pace=slo.tpot,
        first=arrival if generated else None,
        last=arrival,
    )


def model(
    name: str,
    residency: Residency = Residency.RESIDENT,
    *,
    pages: int = 10,
    kv: int = 0,
    cached: int = 0,
    loose: int = 0,
    waiting: tuple[RequestView, ...] = (),
    running: tuple[RequestView, ...] = (),
    first: int = 0,
    last_used: float = 0.0,
    limit: int | None = None,
    held: bool = False,
    frozen: bool = False,
    share: float = 1.0,
    pinned: bool = False,
    shared: tuple[SharedView, ...] = (),
    cached_borrowed: int = 0,
    first_cached: int = 0,
) -> ModelView:
    own = (pages - sum(s.pages for s in shared),)
    return ModelView(
        plan=plan(own, shared, absent=residency in (Residency.ABSENT, Residency.FAILED)),
        spec=spec(name, pages=pages, share=share, pinned=pinned),
        residency=residency,
        weight_pages=pages,
        kv_pages=kv,
        cached_pages=cached,
        loose_pages=loose,
        limit=limit,
        held=held,
        frozen=frozen,
        busy=False,
        waiting=waiting,
        running=running,
        slab_pages=1,
        slab_blocks=4,
        first_pages=first,
        last_used=last_used,
        costs=UNMEASURED,
        shared=shared,
        cached_borrowed=cached_borrowed,
        first_cached_pages=first_cached,
    )


def plan(
    own: Sequence[int], shared: Sequence[SharedView] = (), *, absent: bool = False
) -> ResidencyPlan:
    """Where units of so many pages are, the first the embeddings, and then those that are shared:
    on the device, or absent."""
    units = [Unit(n, n * PAGE) for n in own] + [Unit(s.pages, s.pages * PAGE, True) for s in shared]
    here = ResidencyPlan(tuple(units), len(own) - 1)
    return here.without(None) if absent else here


def in_parts(m: ModelView, *own: int, gone: int = 0) -> ModelView:
    """`m` with units of so many pages, of which the last `gone` are absent."""
    here = plan(own, m.shared)
    return replace(m, plan=replace(here, absent=frozenset(range(len(own) - gone, len(own)))))


def away(m: ModelView) -> ModelView:
    """`m` without weights on the device."""
    return replace(m, residency=Residency.ABSENT, plan=m.plan.without(None))


def kind(action: Action) -> str:
    """Name of what an action does; of a plan, whether the model then runs."""
    if not isinstance(action, Reside):
        return type(action).__name__
    return "Activate" if action.plan.runnable else "Evict"


def evicted(actions: Iterable[Action]) -> dict[str, int | None]:
    """By model, the pages that are absent by an eviction; None: all."""
    plans = {a.model: a.plan for a in actions if isinstance(a, Reside) and not a.plan.runnable}
    return {name: None if p.empty else p.missing_pages for name, p in plans.items()}


def activated(actions: Iterable[Action]) -> list[str]:
    """Models that come, or whose layers turn."""
    return [a.model for a in actions if isinstance(a, Reside) and a.plan.runnable]


def layered(
    m: ModelView,
    *,
    layers: int = 8,
    pages: int = 2,
    lent: int = 0,
    decode: float = 4e-3,
    prefill: float = 8e-3,
    priority: int = 0,
) -> ModelView:
    """`m` with layers that can rotate, each copied in 1 ms where the link has 1 GB/s."""
    rotation = Rotation(tuple(range(lent + 1)), 1) if lent else WHOLE
    units = (Unit(0, 0), *(Unit(pages, 1_000_000) for _ in range(layers)))
    here = ResidencyPlan(units, layers, rotation)
    return replace(
        m,
        spec=replace(m.spec, n_layers=layers, priority=priority),
        plan=here if m.plan.runnable else here.without(None),
        rotatable=tuple(range(layers)),
        layer_pages=pages,
        layer_bytes=1_000_000,
        decode_seconds=decode,
        prefill_seconds=prefill,
    )


def device(
    *models: ModelView,
    free: int,
    total: int = 100,
    arena: int = 4,
    reclaiming: int = 0,
    now: float = 10.0,
    shortages: tuple[Shortage, ...] = (),
    borrowed: int = 0,
    lent: tuple[tuple[str, int], ...] = (),
    recalled: int = 0,
) -> DeviceView:
    return DeviceView(
        now=now,
        page_bytes=PAGE,
        total=total,
        arena=arena,
        free=free,
        reclaiming=reclaiming,
        promised=0,
        link_bytes_per_second=1e9,
        models=models,
        shortages=shortages,
        borrowed=borrowed,
        lent=lent,
        recalled=recalled,
    )
