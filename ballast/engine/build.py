"""Build the state of one device's engine from the memory, link, clock and models passed in.

Used by live devices, by the simulator, by story replay, and for models that join a live device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ballast.core.clock import Clock
from ballast.core.cost import UNMEASURED, StepCosts
from ballast.core.errors import ConfigError
from ballast.core.model import ModelSpec
from ballast.core.settings import DeviceSettings
from ballast.core.units import format_bytes
from ballast.engine.cost_estimator import CostEstimator
from ballast.engine.layer_stream import MakeStream
from ballast.engine.lending import Lending
from ballast.engine.model import ModelState
from ballast.engine.sizing import largest_jobs
from ballast.engine.state import DeviceState
from ballast.kv.blocks import KvCache
from ballast.memory.arena import Arena
from ballast.memory.lending.borrower import Borrower
from ballast.memory.pool import Pool
from ballast.memory.transfer import Link
from ballast.memory.vm import Vm
from ballast.weights.residency import WeightsOnDevice
from ballast.weights.shared import SharedSegment, find_shared

ARENA = "arena:lanes"
"""Owner of the pages that account for activations."""
GRAPHS = "arena:graphs"
"""Owner of the pages that account for CUDA graphs."""
HOST_POOLS = 4
"""Most KV of a model on the host, as a multiple of the device's memory."""
CopyNow = Callable[[int, int, int], None]
"""Synchronous copy: (destination address, source address, bytes)."""


@dataclass(frozen=True, slots=True)
class Hosted:
    """A model in the host tier: its sizes, and where each segment's bytes are."""

    spec: ModelSpec
    addresses: Sequence[int]


def build_state(
    settings: DeviceSettings,
    hosted: Sequence[Hosted],
    vm: Vm,
    link: Link,
    clock: Clock,
    copy: CopyNow,
    costs: Mapping[str, StepCosts],
    make_stream: MakeStream | None = None,
    refuse: Callable[[str, Exception], object] | None = None,
    stages_kv: bool = False,
) -> DeviceState:
    """Build the state of a device on which no model is resident yet.

    The lanes' activation arena, sized by the largest jobs of the models, is allocated first.
    `make_stream`: makes what streams a model's layers; None: none can stream. `stages_kv`: blocks
    of KV can be staged, beside weights that stream. `refuse` is called with the name of a model
    that cannot be placed and the exception; the other models are placed. Raises ConfigError if the
    budget cannot hold the arena, and, without `refuse`, the exception of a model that cannot be
    placed.
    """
    pool = Pool(vm, settings.budget_bytes // settings.page_bytes)
    lending = Lending(pool, Borrower(pool, vm, settings.name), settings.name)
    arena, graphs = _reserve_arenas(pool, [h.spec for h in hosted], settings)
    shared = find_shared([h.spec for h in hosted], pool, vm.page_bytes)
    models = []
    for h in hosted:
        try:
            m = build_model(
                h,
                settings,
                pool,
                link,
                copy,
                shared,
                lending.borrower,
                costs.get(h.spec.name),
                make_stream,
                stages_kv,
            )
        except Exception as error:
            if refuse is None:
                raise
            refuse(h.spec.name, error)
        else:
            models.append(m)
    parts = (settings, models, pool, arena, graphs, link, clock, lending)
    return DeviceState(*parts, make_stream, stages_kv)


def _reserve_arenas(
    pool: Pool, specs: Sequence[ModelSpec], settings: DeviceSettings
) -> tuple[Arena, Arena]:
    """Take the pages for activations and for CUDA graphs from the pool, in that order. Raises
    ConfigError where the budget cannot hold them."""
    activations = largest_jobs(specs, settings)
    arena = Arena(pool, ARENA, activations, settings.budget_bytes)
    if arena.short is not None:
        raise ConfigError(
            f"the budget of {settings.name}",
            format_bytes(settings.budget_bytes),
            f"activations alone need {format_bytes(activations)}: of a job on each lane",
        )
    graphs = Arena(pool, GRAPHS, settings.graph_bytes)
    if graphs.short is not None:
        raise ConfigError(
            f"graphs of {settings.name}",
            format_bytes(settings.graph_bytes),
            f"activations leave {format_bytes(pool.free * settings.page_bytes)} of its budget",
        )
    return arena, graphs


def build_model(
    hosted: Hosted,
    settings: DeviceSettings,
    pool: Pool,
    link: Link,
    copy: CopyNow,
    shared: Mapping[str, SharedSegment],
    borrower: Borrower,
    costs: StepCosts | None = None,
    make_stream: MakeStream | None = None,
    stages_kv: bool = False,
) -> ModelState:
    """Build the state of a model that is not resident. `shared`: segments that other models have
    too, by digest. Without `costs`, costs are learned from the model's jobs."""
    # Layers of a block go together: a state is of no layer, or they are of several sizes.
    if hosted.spec.states or hosted.spec.layer_kv:
        stages_kv = False
    kv = KvCache(
        hosted.spec,
        pool,
        pool.vm,
        prefix=settings.prefix_cache and not hosted.spec.pooling,
        borrower=borrower,
        host_blocks=_host_blocks(hosted.spec, pool) if stages_kv else 0,
    )
    stream = None if make_stream is None else make_stream(hosted.spec)
    kv_staging = stream if kv.staged.most else None
    if kv_staging is not None:
        kv_staging.add_staging(kv)
    kv.book.move = _mover(kv, copy)
    weights = WeightsOnDevice(hosted.spec, pool, pool.vm, link, hosted.addresses, shared, stream)
    m = ModelState(hosted.spec, weights, kv, costs or UNMEASURED, kv_staging=kv_staging)
    if costs is None:
        m.estimator = CostEstimator(UNMEASURED)
    return m


def build_newcomer(
    state: DeviceState, hosted: Hosted, copy: CopyNow, costs: StepCosts | None = None
) -> tuple[ModelState, dict[str, SharedSegment]]:
    """Build a model that may join a device; returns it and the segments that it newly shares."""
    present = tuple(state.models.values())
    known = {
        digest: segment.shared
        for m in present
        if m.spec.segment_digests
        for digest, segment in zip(m.spec.segment_digests, m.weights.segments, strict=True)
        if segment.shared is not None
    }
    specs = [*(m.spec for m in present), hosted.spec]
    new = find_shared(specs, state.pool, state.pool.vm.page_bytes, known)
    shared = {**known, **new}
    borrower = state.lending.borrower
    m = build_model(
        hosted,
        state.settings,
        state.pool,
        state.link,
        copy,
        shared,
        borrower,
        costs,
        state.make_stream,
        state.stages_kv,
    )
    return m, new


def _host_blocks(spec: ModelSpec, pool: Pool) -> int:
    """Return the most blocks of a model that are staged: as many as `HOST_POOLS` pools hold."""
    return HOST_POOLS * pool.total * pool.vm.page_bytes // spec.block_bytes


def _mover(kv: KvCache, copy: CopyNow) -> Callable[[int, int], None]:
    """Return a function that copies one block of `kv` onto another."""

    def move(source: int, target: int) -> None:
        copy(kv.block_address(target), kv.block_address(source), kv.layout.block_bytes)

    return move
