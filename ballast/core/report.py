"""What a device tells the controller about itself, for routing, metrics and display."""

from __future__ import annotations

from dataclasses import dataclass, field

from ballast.core.cost import Traffic

STEP_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Tokens of a job: upper bounds of the buckets in which jobs are counted, vLLM's."""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Jobs of a model since start, by the number of tokens that each computed."""

    counts: tuple[int, ...] = (0,) * (len(STEP_BOUNDS) + 1)
    """By bucket: of jobs within each of `STEP_BOUNDS` and above the one before; last, above all."""
    total: int = 0
    """Tokens of all of them."""

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
    """Pages its weights take now, slots and those that it shares with other models included."""
    kv_pages: int
    """Of the device itself."""
    cached_pages: int
    waiting: int
    running: int
    late: int
    """Of those waiting, they that have used up half of the time in which their first token is due;
    of those running, they whose tokens come more slowly than they should."""
    lane_seconds: float
    """That its jobs have taken, since start; likewise what follows."""
    activations: int
    evictions: int
    preemptions: int
    prompt_tokens: int
    """Of all finished requests."""
    cached_tokens: int
    output_tokens: int
    paused: int = 0
    """Requests whose client does not read, or whose grammar is being compiled."""
    borrowed_pages: int = 0
    """Pages of other devices that back its KV."""
    layers: int = 0
    """Of a decoder, or of an encoder."""
    resident_layers: int = 0
    """With memory of their own, on the device."""
    rotating_layers: int = 0
    """That share slots (MIRAGE, 5.4)."""
    absent_layers: int = 0
    """Not on the device now: of those that rotate, as many as slots cannot hold."""
    lent_pages: int = 0
    """That its layers have given up, for others to have."""
    loads: int = 0
    """Layers brought since start, one by one, because they rotate or did; likewise below."""
    loaded_bytes: int = 0
    copy_seconds: float = 0.0
    """Of these loads on the link."""
    stall_seconds: float = 0.0
    """In which its jobs waited for them."""
    steps: StepTokens = StepTokens()
    traffic: Traffic = field(default_factory=Traffic)
    """Of the requests accepted, and of those that have ended, lately."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphReport:
    """CUDA graphs of one device."""

    graphs: int
    pieces: int
    """That they consist of."""
    n_bytes: int
    """That they take, of `cap_bytes` set aside."""
    cap_bytes: int
    replays: int
    """Jobs that ran by one, since start; likewise what follows."""
    eager: int
    """Decode jobs that found none."""
    dropped: int
    """Graphs given up, for others or with their models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """One device at one moment."""

    device: str
    now: float
    """Seconds on the device's clock."""
    page_bytes: int
    """Of all ranks together, where the device has several."""
    total: int
    """Pages of the pool."""
    free: int
    reclaiming: int
    owners: dict[str, int]
    """Pages by owner, `weights:NAME`, `slots:NAME` (of layers that rotate), `kv:NAME`,
    `shared:DIGEST` (weights of several models), `arena:lanes`, `arena:graphs`,
    `lent:DEVICE`; in all total - free - reclaiming."""
    models: tuple[ModelReport, ...]
    jobs: int
    """Jobs run since start."""
    draining: bool
    borrowed: dict[str, int] = field(default_factory=dict)
    """Pages of other devices that it may use, by device; of no account above."""
    graphs: GraphReport | None = None
    """None: it has none."""
