"""Put one device's engine together, on whatever memory, link, clock and models it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ballast.core.clock import Clock
from ballast.core.cost import UNMEASURED, StepCosts, activation_bytes
from ballast.core.errors import ConfigError
from ballast.core.model import ModelSpec
from ballast.core.settings import DeviceSettings
from ballast.core.units import format_bytes
from ballast.engine.state import DeviceState, ModelState
from ballast.kv.blocks import KvCache
from ballast.memory.arena import Arena
from ballast.memory.pool import Pool
from ballast.memory.transfer import Link
from ballast.memory.vm import Vm
from ballast.weights.residency import WeightsOnDevice
from ballast.weights.shared import find_shared

CopyNow = Callable[[int, int, int], None]
"""(destination address, source address, bytes): a copy that has ended when it returns."""


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
) -> DeviceState:
    """The state of a device on which no model is resident yet.

    The lane's activation arena, sized by the largest job any of the models may run, is taken from
    the pool first. Raises ConfigError where the budget cannot hold it.
    """
    pool = Pool(vm, settings.budget_bytes // settings.page_bytes)
    activations = max(
        (activation_bytes(h.spec, settings.step_tokens, settings.step_logits) for h in hosted),
        default=0,
    )
    arena = Arena(pool, vm, "arena:lane0", activations)
    if arena.short is not None:
        raise ConfigError(
            "devices[0].budget",
            format_bytes(settings.budget_bytes),
            f"the activations of one job alone need {format_bytes(activations)}",
        )
    shared = find_shared([h.spec for h in hosted], pool, vm.page_bytes)
    models = []
    for h in hosted:
        kv = KvCache(h.spec, pool, vm, prefix=settings.prefix_cache)
        kv.move = _mover(kv, copy)
        weights = WeightsOnDevice(h.spec, pool, vm, link, h.addresses, shared)
        models.append(ModelState(h.spec, weights, kv, costs.get(h.spec.name, UNMEASURED)))
    return DeviceState(settings, models, pool, arena, link, clock)


def _mover(kv: KvCache, copy: CopyNow) -> Callable[[int, int], None]:
    """Copies one block of `kv` onto another."""

    def move(source: int, target: int) -> None:
        copy(kv.block_address(target), kv.block_address(source), kv.layout.block_bytes)

    return move
