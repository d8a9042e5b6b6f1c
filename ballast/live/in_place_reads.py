"""List what passes read where it lies: weights in host memory, KV on pages of other devices.

`paced` joins them to the barriers of an executor, where the links have a pace (`paced_reads`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Protocol

from ballast.core.clock import Clock
from ballast.core.job import SequenceWork
from ballast.core.link_budget import link_demand
from ballast.core.pass_traffic import decode_bytes
from ballast.engine.model import ModelState
from ballast.kernels.paged_attention import LayerPlaces
from ballast.kv.blocks import KvCache
from ballast.live.cuda_reads import KernelReads
from ballast.live.machine import Machine
from ballast.live.paced_reads import PacedReads
from ballast.live.peer_slots import PeerSlots, peer_slots
from ballast.memory.copies import Copy
from ballast.memory.transfer import HostLink
from ballast.models.barriers import Barriers
from ballast.weights.residency import WeightsOnDevice


class ChosenExperts(Protocol):
    """What an executor knows of the experts in a layer."""

    def expert_bytes(self, layer: int) -> int:
        """Return the bytes of all experts of a layer; 0: it has none, or they are always read."""

    def chosen_bytes(self, layer: int) -> int:
        """Return the bytes of those that the present pass, which has run the layer, has chosen."""


def paced(
    stream: Barriers,
    m: ModelState,
    machine: Machine,
    clock: Clock,
    experts: ChosenExperts,
    slot_bytes: int = 0,
) -> Barriers:
    """Return barriers that pace what an executor reads in place too, over links with a pace.
    `slot_bytes`: of the slots in which it reads copies of borrowed KV. Kernels that read host
    memory themselves learn there what a pass reads."""
    link, peers, barriers = machine.link, machine.peer_link, stream
    if isinstance(link, HostLink) and link.paced:
        barriers = PacedReads(barriers, link, clock, WeightReads(m.weights, experts))
    if peers is not None:
        borrowed = BorrowedReads(m.kv, peer_slots(m.kv, slot_bytes))
        barriers = PacedReads(barriers, peers, clock, borrowed)
    if machine.host_kernels is not None:
        barriers = KernelReads(barriers, m.weights, machine.host_kernels)
    return barriers


def peer_rate(machine: Machine) -> float | None:
    """Return the rate at which passes read borrowed pages: memory of a CPU is mapped, and read as
    its own unless its link has a pace; None: as over the link to the host."""
    if machine.peer_link is not None:
        return machine.peer_link.bytes_per_second
    return inf if machine.reach is None else None


class WeightReads:
    """Weights in host memory. Implements `LayerReads`.

    Of a layer's experts only those count that the pass has chosen, once it has. Rows of embeddings
    do not; what follows the layers does, with the last of them.
    """

    def __init__(self, weights: WeightsOnDevice, experts: ChosenExperts) -> None:
        self.name = f"in place:{weights.spec.name}"
        self._demand = link_demand(decode_bytes(weights.spec), weights.spec.slo.tpot)
        self._weights, self._experts = weights, experts
        self._last = -1

    @property
    def reserved(self) -> float:
        return self._demand * self._weights.plan.share_away

    def places(self, work: Sequence[SequenceWork]) -> LayerPlaces | None:
        return None

    def copies(self, layer: int) -> Sequence[Copy]:
        return ()

    def begin_pass(self, work: Sequence[SequenceWork]) -> Sequence[int]:
        in_place = self._weights.plan.in_place
        layers = [i for i in range(self._weights.spec.n_layers) if 1 + i in in_place]
        self._last = layers[-1] if layers else -1
        return layers

    def read_bytes(self, layer: int) -> int:
        table, in_place = self._weights.segments, self._weights.plan.in_place
        n_bytes = table[1 + layer].n_bytes - self._experts.expert_bytes(layer)
        if layer == self._last:
            after = range(1 + self._weights.spec.n_layers, len(table))
            n_bytes += sum(table[i].n_bytes for i in after if i in in_place)
        return max(1, n_bytes)

    def late_bytes(self, layer: int) -> int:
        return self._experts.chosen_bytes(layer)

    def written_bytes(self, layer: int) -> int:
        return 0


class BorrowedReads:
    """KV on borrowed pages. Implements `LayerReads`.

    A pass reads all of its sequences' blocks there, those that they share once, and writes the KV
    of its new tokens. With `slots` it reads full blocks there, as copies, as many as have room.
    """

    reserved = 0.0

    def __init__(self, kv: KvCache, slots: PeerSlots | None = None) -> None:
        self.name = f"borrowed:{kv.spec.name}"
        self._kv, self._slots = kv, slots
        self._read = self._written = 0

    def places(self, work: Sequence[SequenceWork]) -> LayerPlaces | None:
        return None if self._slots is None else self._slots.places(work)

    def copies(self, layer: int) -> Sequence[Copy]:
        return () if self._slots is None else self._slots.copies(layer)

    def begin_pass(self, work: Sequence[SequenceWork]) -> Sequence[int]:
        spec = self._kv.spec
        read, tokens = self._kv.borrowed.use([(w.blocks, w.start, w.end) for w in work])
        copied = 0 if self._slots is None else self._slots.begin_pass(work)
        self._read = (read - copied) * self._kv.layout.layer_bytes
        self._written = tokens * spec.kv_bytes_per_token // spec.n_layers
        return range(spec.n_layers) if read or self._written else ()

    def read_bytes(self, layer: int) -> int:
        return self._read

    def late_bytes(self, layer: int) -> int:
        return 0

    def written_bytes(self, layer: int) -> int:
        return self._written
