"""Define `DeviceReport`: a device's state for routing, metrics and display, as plain data.

Built by the engine (`engine.report`), sent by the worker to the controller. Policies of the device
do not read it: they read `core.view`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ballast.core.cost import StepCosts, Traffic
from ballast.core.price_curve import PriceCurve

STEP_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the histogram buckets of tokens per job; the same as vLLM's."""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Histogram of the jobs of a model since start, by the number of tokens computed."""

    counts: tuple[int, ...] = (0,) * (len(STEP_BOUNDS) + 1)
    """Jobs in each bucket: up to each of `STEP_BOUNDS`; the last counts those above all bounds."""
    total: int = 0
    """Tokens of all jobs."""

    def __add__(self, other: StepTokens) -> StepTokens:
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        return StepTokens(counts, self.total + other.total)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """One model on one device."""

    name: str
    residency: str
    """A value of `ballast.core.view.Residency`."""
    weight_pages: int
    """Pages of its weights on the device, including slots and segments shared with other models."""
    kv_pages: int
    """Pages of its KV cache, without borrowed ones."""
    cached_pages: int
    waiting: int
    running: int
    late: int
    """Late requests: waiting for more than half of their TTFT target, or running with tokens slower
    than their TPOT target."""
    lane_seconds: float
    """Lane seconds of its jobs since start; the counts that follow are since start, too."""
    activations: int
    evictions: int
    preemptions: int
    prompt_tokens: int
    """Prompt tokens of all finished requests."""
    cached_tokens: int
    output_tokens: int
    whole_pages: int = 0
    """Pages of all of its weights, on the device or not."""
    missed_blocks: int = 0
    """Blocks of cached prefixes forgotten to make room, then computed again, since start."""
    lacking: int = 0
    """Waiting requests that pages would let run: without those beyond `max_running`."""
    lacking_tokens: int = 0
    """Tokens of these, whose KV they lack."""
    longest_tokens: int = 0
    """Tokens of the longest request of the last minute or two (`core.traffic.LongestRequest`)."""
    paused: int = 0
    """Paused requests: the client does not read, or the grammar is being compiled."""
    borrowed_pages: int = 0
    """Pages of other devices that back its KV."""
    staged_blocks: int = 0
    """KV blocks of its requests that lie on the host and are read layer by layer."""
    staged_bytes: int = 0
    layers: int = 0
    """Number of layers."""
    resident_layers: int = 0
    """Layers with memory of their own on the device."""
    rotating_layers: int = 0
    """Layers that share slots (MIRAGE, 5.4)."""
    absent_layers: int = 0
    """Layers that are not on the device now: the rotating ones that the slots cannot hold."""
    in_place_layers: int = 0
    """Layers that passes read in host memory (C2CServe, 5)."""
    lent_pages: int = 0
    """Pages that its rotating layers have freed for other use."""
    loads: int = 0
    """Loads of single layers since start because of rotation; so are the three that follow."""
    loaded_bytes: int = 0
    copy_seconds: float = 0.0
    """Seconds of these loads on the link."""
    stall_seconds: float = 0.0
    """Seconds in which its jobs waited for these loads."""
    steps: StepTokens = StepTokens()
    cached_pages_of: dict[str, int] = field(default_factory=dict)
    """Pages that hold cached prefixes only, by tenant (API key; empty: without one)."""
    set_aside: dict[str, str] = field(default_factory=dict)
    """Why requests for its name, or an adapter's, are refused: its last ones failed."""
    costs: StepCosts | None = None
    """Costs of its jobs, learned or given."""
    traffic: Traffic = field(default_factory=Traffic)
    """Recent traffic: rate of accepted requests, mean lengths of ended ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphReport:
    """CUDA graphs of one device."""

    graphs: int
    pieces: int
    """Pieces of which the graphs consist."""
    n_bytes: int
    """Bytes of the graphs, of `cap_bytes` set aside."""
    cap_bytes: int
    replays: int
    """Jobs that ran by a graph, since start; so are the two that follow."""
    eager: int
    """Decode jobs without a matching graph."""
    dropped: int
    """Graphs dropped to make room for others, or with their models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """State of one device at one moment."""

    device: str
    now: float
    """Seconds on the device's clock."""
    page_bytes: int
    """Bytes of a page; of all ranks together, if the device has several."""
    total: int
    """Pages of the pool."""
    free: int
    reclaiming: int
    owners: dict[str, int]
    """Pages by owner: `weights:NAME`, `slots:NAME` (of rotating layers), `kv:NAME`,
    `shared:DIGEST` (weights of several models), `arena:lanes`, `arena:graphs`, `lent:DEVICE`. The
    sum is total - free - reclaiming."""
    models: tuple[ModelReport, ...]
    jobs: int
    """Jobs run since start."""
    draining: bool
    borrowed: dict[str, int] = field(default_factory=dict)
    """Pages borrowed from other devices, by device; not counted above."""
    graphs: GraphReport | None = None
    """CUDA graphs; None: the device has none."""
    fetched_tokens: dict[str, int] = field(default_factory=dict)
    """Prompt tokens whose KV came from tiers below the device, since start, by tier."""
    prices: PriceCurve | None = None
    """Marginal prices of its pages; None: no fleet policy reads them."""
    activation_bytes_per_second: float = 0.0
    """Rate at which activations have brought weights lately, else the link's; 0: unknown."""
