"""Estimate job costs of a model that was not measured: hardware peaks, derated by measured factors.

A pass reads the weights, a prefill multiplies, attention reads KV: each over the peak that bounds
it, times a factor that was measured on that device, plus the host's work. `roofline` has device and
engine in one derate, as fits of one engine's jobs yield them (`scripts/derating.py`); `step_costs`
separates them: factors of kernels (`KernelReach`), and costs of an engine's host
(`EngineHostCosts`). Used by `sim.profile`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pydantic import Field

from ballast.core.cost import TILE, StepCosts
from ballast.core.model import ModelSpec
from ballast.core.pass_traffic import PassSizes
from ballast.fleet.field_types import Positive
from ballast.fleet.schema import Keys
from ballast.sim.model_catalogue import ModelFacts
from ballast.sim.toml_file import NotNegative, Size, Whole


class Hardware(Keys):
    """A device's peaks. Bandwidths are bytes per second in one direction."""

    memory_bytes: Size
    memory_bandwidth: Positive
    flops: Positive
    """Dense bfloat16."""
    multiprocessors: Size
    host_link: str
    host_bandwidth: Positive
    """Nominal bandwidth of the link; the usable bandwidth is in the profile's `link`."""
    peer_link: str
    peer_bandwidth: Positive | None = None
    source: str
    unverified: list[str] = Field(default_factory=list)
    """Keys without a known vendor's document."""
    note: str = ""


class Derate(Keys):
    """Factors on the times that the peaks give, and the host's work, fitted to a device's jobs."""

    layer_seconds: NotNegative
    """Host and launches, per layer of a pass."""
    weights: NotNegative
    """x the time to read them from device memory."""
    floor: NotNegative
    """The least that a prefill takes, x a decode step's base."""
    start: NotNegative
    """Part of the base that a long prefill does not overlap, x the base."""
    arithmetic: NotNegative
    """x the time of a prefill's matrix products at the peak."""
    attention: NotNegative
    """x the time of a prefill's attention at the peak."""
    sequence_seconds: NotNegative
    """Host, per decoding sequence."""
    kv: NotNegative
    """x the time to read the KV cache from device memory."""
    tile: NotNegative
    """A tile of decoding sequences more, x its matrix products at the peak."""
    group_layer_seconds: NotNegative
    """Host and launches, per layer, in a group of devices: the least that a pass takes there."""
    group_floor: NotNegative
    """`floor` in a group of devices."""
    group_start: NotNegative
    """`start` in a group of devices."""


class KernelReach(Keys):
    """Fractions of peak that kernels reach on a device, whichever engine launches them."""

    layer_seconds: NotNegative
    """Seconds of a layer beyond reading: kernel starts, norms, attention over a short KV."""
    reading: Positive
    """x the time to read weights or KV from device memory at the peak."""
    start: NotNegative
    """Part of a pass that a long prefill's arithmetic does not overlap, x the pass."""
    arithmetic: Positive
    """x the time of a prefill's matrix products at the peak."""
    attention: Positive
    """x the time of a prefill's attention at the peak."""
    tile: NotNegative
    """A tile of decoding sequences more, x its matrix products at the peak."""
    source: str
    assumed: list[str] = Field(default_factory=list)
    """Keys that have not been measured on this device."""


class EngineHostCosts(Keys):
    """Seconds of an engine's work on the host; no device time is included."""

    step_seconds: NotNegative
    """At every step: scheduling, preparing inputs, handling outputs."""
    sequence_seconds: NotNegative = 0.0
    """Host seconds for each decoding sequence of a step."""
    layer_seconds: NotNegative = 0.0
    """Seconds to launch a layer's kernels: the least that a step takes per layer."""
    group_layer_seconds: NotNegative = 0.0
    """`layer_seconds` in a group of devices."""
    all_reduce: NotNegative = 1.0
    """x the device's least time of an all-reduce, which is NCCL's."""
    all_reduce_bytes: NotNegative = 1.0
    """x the seconds per byte of the same."""
    graphs: bool = False
    """Decode steps are CUDA graphs: only prefills' kernels are launched by the host."""
    steps_ahead: Whole = 0
    """Steps that an asynchronous engine schedules ahead of the one that runs. The host works beside
    the device, and a request that finds the device busy waits for as many more steps."""


class AllReduce(Keys):
    """One all-reduce among `tp` devices of a node: max(least, base + bytes*per_byte) seconds."""

    tp: Size
    least: NotNegative
    base: NotNegative
    per_byte: NotNegative
    source: str
    error: NotNegative | None = None
    """Mean relative error of the fit, in per cent; below 1 MiB it is several times that."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a model that the roofline needs."""

    layers: int
    hidden: int
    pass_bytes: int
    """Weights that every pass reads: all but the embeddings, of which it reads a few rows."""
    active: int
    """Elements of the layers' matrices that a token is multiplied with."""
    pair_flops: int
    """FLOPs of attention for one query and one key, in all layers."""
    kv_bytes: int
    """KV bytes of one token, in all layers."""
    expert_bytes: int = 0
    """Part of `pass_bytes` in experts, of which a pass reads those that its rows choose."""
    not_chosen: float = 0.0
    """Probability that a row does not go through a given expert of a layer."""

    @property
    def part_in_experts(self) -> float:
        """Part of the bytes of a pass that reads all experts."""
        return self.expert_bytes / self.pass_bytes if self.pass_bytes else 0.0

    @classmethod
    def of_facts(cls, m: ModelFacts) -> Sizes:
        """Sizes of a catalogue model in bfloat16."""
        return cls(
            layers=m.layers,
            hidden=m.hidden,
            pass_bytes=2 * (m.layer_parameters + m.embedding),
            active=m.layer_parameters - (m.parameters - m.active_parameters),
            pair_flops=4 * m.layers * m.heads * m.head_dim,
            kv_bytes=4 * m.layers * m.kv_heads * m.head_dim,
            expert_bytes=2 * m.layers * m.experts * 3 * m.hidden * m.intermediate,
            not_chosen=1 - m.experts_per_token / m.experts if m.experts else 0.0,
        )

    @classmethod
    def of_spec(cls, spec: ModelSpec) -> Sizes:
        """Return the sizes of a spec as it is served: per token, the routed and the shared experts.

        Elements are counted by the tensors' bytes, padding of packed forms included.
        """
        layers = sum(spec.segment_bytes[1 : spec.n_layers + 1])
        rest = spec.segment_bytes[spec.n_layers + 1 : len(spec.segment_bytes) - len(spec.adapters)]
        active = layers // spec.dtype_bytes
        routed = PassSizes.of(spec)
        if spec.experts_per_token:
            attention = 2 * (spec.n_heads + spec.kv_heads) * spec.head_dim
            inner = spec.experts_per_token * spec.expert_intermediate
            active = spec.n_layers * spec.hidden * (attention + 3 * inner)
        return cls(
            layers=spec.n_layers,
            hidden=spec.hidden,
            pass_bytes=layers + (sum(rest) if rest else spec.segment_bytes[0]),
            active=active,
            pair_flops=4 * spec.n_layers * spec.n_heads * spec.head_dim,
            kv_bytes=spec.kv_bytes_per_token,
            expert_bytes=routed.expert_bytes,
            not_chosen=routed.not_chosen,
        )

    def without_reading(self) -> Sizes:
        """Return the sizes of a model whose weights are read in no time."""
        return replace(self, pass_bytes=0, expert_bytes=0)


def roofline(
    sizes: Sizes, hardware: Hardware, derate: Derate, group: AllReduce | None = None
) -> StepCosts:
    """Derive a model's costs on one device, or split among a group's devices, from peaks and
    derate.

    A group adds two all-reduces to each layer. Its host's work either bounds a pass or hides.
    """
    tp = 1 if group is None else group.tp
    token = 2 * sizes.active / hardware.flops / tp
    reading = derate.weights * sizes.pass_bytes / hardware.memory_bandwidth / tp
    base, floor, start = derate.layer_seconds * sizes.layers + reading, derate.floor, derate.start
    message = 0.0
    if group is not None:
        rounds = 2 * sizes.layers
        message = rounds * group.per_byte * 2 * sizes.hidden
        base = max(derate.group_layer_seconds * sizes.layers, reading + rounds * group.least)
        floor, start = derate.group_floor, derate.group_start
    return StepCosts(
        base=base,
        per_token=derate.arithmetic * token + message,
        per_sequence=derate.sequence_seconds + message,
        per_context=derate.kv * sizes.kv_bytes / hardware.memory_bandwidth / tp,
        per_pair=derate.attention * sizes.pair_flops / hardware.flops / tp,
        floor=floor * base,
        hidden=(1 - start) * base,
        per_tile=derate.tile * TILE * token,
        expert_reading=reading * sizes.part_in_experts,
        not_chosen=sizes.not_chosen,
    )


def step_costs(
    sizes: Sizes,
    hardware: Hardware,
    reach: KernelReach,
    host: EngineHostCosts,
    group: AllReduce | None = None,
) -> StepCosts:
    """Derive a model's costs under an engine with this host, on one device or in a group.

    A step takes what the device takes, and no less than the host needs to launch it; what else the
    host does comes on top, or goes on beside it in an engine that schedules ahead.
    """
    tp = 1 if group is None else group.tp
    token = 2 * sizes.active / hardware.flops / tp
    device = reach.layer_seconds * sizes.layers
    reading = reach.reading * sizes.pass_bytes / hardware.memory_bandwidth / tp
    device += reading
    launching, message = host.layer_seconds * sizes.layers, 0.0
    if group is not None:
        rounds = 2 * sizes.layers
        device += rounds * host.all_reduce * group.least
        launching = host.group_layer_seconds * sizes.layers
        message = rounds * host.all_reduce_bytes * group.per_byte * 2 * sizes.hidden

    def step(launching: float) -> float:
        beside = (device, launching, host.step_seconds)
        return max(beside) if host.steps_ahead else max(beside[:2]) + host.step_seconds

    base = step(0.0 if host.graphs else launching)
    # Experts that are not read shorten a step down to what the host takes for it.
    least = max(0.0 if host.graphs else launching, host.step_seconds if host.steps_ahead else 0.0)
    return StepCosts(
        base=base,
        per_token=reach.arithmetic * token + message,
        per_sequence=host.sequence_seconds + message,
        per_context=reach.reading * sizes.kv_bytes / hardware.memory_bandwidth / tp,
        per_pair=reach.attention * sizes.pair_flops / hardware.flops / tp,
        floor=step(launching),
        hidden=base - (reach.start * device + (0.0 if host.steps_ahead else host.step_seconds)),
        per_tile=reach.tile * TILE * token,
        expert_reading=min(reading * sizes.part_in_experts, max(0.0, device - least)),
        not_chosen=sizes.not_chosen,
    )
