"""What the operator chose, resolved once, frozen, derived with `dataclasses.replace`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ballast.core.capability import CPU, CUDA, GROUP, Capability, GpuReach, Lendable, capabilities
from ballast.core.errors import ConfigError
from ballast.core.link import LinkRates
from ballast.core.units import KiB, MiB, format_bytes

GPU_PAGE = 2 * MiB
"""What drivers map at once on every GPU so far; the device says if it is not enough."""
STORY_BYTES, STORY_PARTS = 1024 * MiB, 8
GRAPH_BYTES = 256 * MiB
"""For CUDA graphs, where nothing else is said. Not measured on a GPU yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Service level of a model, in seconds."""

    ttft: float = 2.0
    """Time to first token, from arrival."""
    tpot: float = 0.2
    """Mean time per output token after the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings:
    """A LoRA adapter, served as a model of its own on the weights of its base."""

    name: str
    path: str
    """Directory with adapter_config.json and adapter_model.safetensors (PEFT's format)."""
    slo: Slo = field(default_factory=Slo)
    priority: int = 0
    max_waiting: int = 10_000
    """Most requests for this adapter queued; more are refused."""
    queue_seconds: float | None = None
    """A request that waited so long without being admitted fails; None: the base's."""
    aliases: tuple[str, ...] = ()
    """Further names by which clients may ask for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """One model of the fleet."""

    name: str
    path: str
    """Directory of a checkpoint: config.json, *.safetensors, tokenizer files."""
    dtype: str = "auto"
    """`auto` (the checkpoint's), `float32` or `bfloat16`."""
    slo: Slo = field(default_factory=Slo)
    priority: int = 0
    """Higher is more important."""
    share: float = 1.0
    """Weight of this model where memory is divided by fixed shares (preset `static`)."""
    max_model_len: int | None = None
    """Most tokens of prompt and output together; None: what the architecture allows."""
    max_running: int = 64
    """Most requests in one batch."""
    max_waiting: int = 10_000
    """Most requests queued; more are refused."""
    queue_seconds: float | None = None
    """A request that waited so long without being admitted fails; None: it waits."""
    block_tokens: int = 16
    pinned: bool = False
    """A pinned model is never evicted."""
    ttl: float | None = None
    """Idle time to live: seconds without a request after which it is evicted; None, 0: never."""
    model_impl: str = "auto"
    """Code that runs it: `generic` (any family), `fused` (Llama-shaped ones, faster), or `auto`."""
    linear: str = "auto"
    """How its matrices lie in memory: `packed` for the CPU's kernels, `plain`, or `auto`."""
    adapters: tuple[AdapterSettings, ...] = ()
    tool_parser: str = "auto"
    """How it writes tool calls (a name of `ballast.server.tools`); `auto`: by its template."""
    devices: tuple[str, ...] = ()
    """Devices that serve it, each of them all of it; none: one that is chosen by its size."""
    aliases: tuple[str, ...] = ()
    """Further names by which clients may ask for it."""

    @property
    def names(self) -> frozenset[str]:
        """Every name by which clients may ask for the model or one of its adapters."""
        served: tuple[ModelSettings | AdapterSettings, ...] = (self, *self.adapters)
        return frozenset(name for s in served for name in (s.name, *s.aliases))


class KvLayout(StrEnum):
    """Which axes of a KV cache (blocks, layers, 2, block_tokens, kv_heads, head_dim) are outermost
    in memory."""

    BLOCK_MAJOR = "block-major"
    """(blocks, layers, ...): a block is one stretch of memory, so one page backs whole blocks of
    all layers (`kv/layout.py`)."""
    PER_LAYER = "per-layer"
    """(layers, blocks, ...): the blocks of one layer lie side by side, in pages of their own
    (`kv/layered.py`)."""


class Role(StrEnum):
    """What of a request a device computes, where several serve its model (disaggregated prefill, as
    of DistServe: Zhong et al., OSDI 2024)."""

    BOTH = "both"
    PREFILL = "prefill"
    """All up to the first token; then it goes on, with its KV, at a device that decodes."""
    DECODE = "decode"
    """What comes from devices that prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSettings:
    """One device and its budget."""

    name: str = "cpu:0"
    budget_bytes: int
    """All memory the device may use: weights, KV cache and activations together."""
    page_bytes: int = 256 * KiB
    page_given: bool = True
    """Whether somebody chose `page_bytes`; else it follows the models (`weights/page_size.py`)."""
    threads: int | None = None
    """Intra-op threads; None: all cores, or an equal share of those that no other device has."""
    lanes: int = 1
    """Most jobs, of different models, that run at the same time; they divide the threads."""
    step_tokens: int = 512
    """Most tokens computed in one job (prefill chunks and decodes together)."""
    step_logits: int = 64
    """Most positions sampled in one job; bounds the logits in the activation arena."""
    prefix_cache: bool = True
    kv_layout: KvLayout = KvLayout.BLOCK_MAJOR
    """Presets that swap KV layer by layer have it per layer, whatever is said here."""
    graphs: int | None = None
    """Most bytes that CUDA graphs take, of the budget; None: `GRAPH_BYTES` on a GPU. 0: there are
    none."""
    role: Role = Role.BOTH
    tensor_parallel: int = 1
    """Ranks, each a process, that share every model of the device, and all that it has, equally."""
    exchange: str = "shared"
    """How ranks on CPUs meet: in `shared` memory, or through `gloo`, which needs none. GPUs meet
    through NCCL."""

    @property
    def gpu(self) -> int | None:
        """Which, as CUDA counts in this process; None: the device is this machine's CPU."""
        kind, _, number = self.name.partition(":")
        return int(number) if kind == CUDA and number.isdecimal() else None

    @property
    def gpus(self) -> range:
        """All of them, as CUDA counts: each rank has one."""
        return range(0) if self.gpu is None else range(self.gpu, self.gpu + self.tensor_parallel)

    @property
    def meets_in_memory(self) -> bool:
        """Whether its ranks meet in memory that they share."""
        return self.gpu is None and self.exchange == "shared"

    @property
    def rotates(self) -> bool:
        """Whether layers can rotate there: not where they are spread over ranks."""
        return self.tensor_parallel == 1

    @property
    def graph_bytes(self) -> int:
        """Set aside for CUDA graphs, which groups do not have."""
        if self.gpu is None or self.tensor_parallel > 1:
            return 0
        return GRAPH_BYTES if self.graphs is None else self.graphs

    @property
    def parts(self) -> int:
        """Equal parts of its compute that jobs on several lanes divide."""
        return self.lanes if self.threads is None else self.threads


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """What joins the host tier and a device. Unpaced (None) by default on CPU."""

    device: str = "cpu:0"
    bytes_per_second: float | None = None
    """In either direction while the other is idle."""
    mixed_bytes_per_second: float | None = None
    """Both directions together, while both carry; None: as one of them alone."""

    @property
    def pace(self) -> LinkRates | None:
        if self.bytes_per_second is None:
            return None
        return LinkRates.even(self.bytes_per_second, self.mixed_bytes_per_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySettings:
    """What one API key may do."""

    name: str
    """For logs and metrics; never the key itself."""
    key: str = field(repr=False)
    models: tuple[str, ...] | None = None
    """None: all."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Of prompts and outputs together."""
    concurrent: int | None = None
    """Most requests open at a time."""
    isolated: bool | None = None
    """Whether its cached prefixes serve no other key; None: where there are several keys."""
    priority: int = 0
    """How far a request of it may raise its own priority. It may lower it as far as it wants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What concerns clients and operators, not devices."""

    keys: tuple[KeySettings, ...] = ()
    """None: no key is asked for."""
    admin_key: str | None = field(default=None, repr=False)
    """None: there are no admin routes."""
    cors_origins: tuple[str, ...] = ()
    """Origins (`scheme://host[:port]`, or `*`: any) whose pages browsers let read responses."""
    most_open: int = 4096
    """Most generating requests open at a time; more are refused (429)."""
    most_connections: int = 8192
    """Most connections; beyond them, requests that generate are refused (429), and at the end of
    any other the connection is closed. Fewer where the process may not have so many files."""
    most_body_bytes: int = 8 * MiB
    """Longest request body; a longer one is refused (413). Its decoding holds up everybody."""
    ping_seconds: float = 5.0
    """A stream that has nothing to say for so long says `: ping`."""
    send_seconds: float = 60.0
    """A client that reads nothing of its answer for so long is disconnected."""
    drain_seconds: float = 30.0
    """For open requests, after SIGTERM."""
    silent_seconds: float = 20.0
    """A worker that says nothing for so long is killed and restarted."""
    stuck_seconds: float = 300.0
    """So is one whose job, or turn of its loop, takes so long."""
    loading_seconds: float = 600.0
    """So is one that starts and loads nothing more for so long."""
    spare_worker: bool = True
    """Whether a process with its libraries loaded waits to replace a worker that dies."""

    @property
    def several_keys(self) -> bool:
        """Whether clients are to be kept apart: each key has a fair share of what all use."""
        return len(self.keys) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """Everything a server serves, and on what."""

    models: tuple[ModelSettings, ...]
    device: DeviceSettings
    """The first one; all of them where there are no `others`."""
    link: LinkSettings = field(default_factory=LinkSettings)
    others: tuple[DeviceSettings, ...] = ()
    """Further devices of this host."""
    other_links: tuple[LinkSettings, ...] = ()
    """Of `others`, in their order."""
    placement: str | None = None
    """Name of the fleet policy: whether models stay where they were placed, or follow the load;
    None: the preset's own."""
    preset: str = "balloon"
    options: dict[str, float] = field(default_factory=dict)
    """Tunables of the preset; an unknown name is a ConfigError."""
    home: str = "."
    """The fleet file's directory: relative paths of models that are added later start there."""
    story_path: str | None = None
    """Where to write every event and decision as JSON lines; None: a ring in memory only."""
    story_bytes: int = STORY_BYTES
    """Size at which a part of the story ends and the next begins; a line is never cut."""
    story_parts: int = STORY_PARTS
    """Older parts that are kept, beside the one that is written to."""
    server: ServerSettings = field(default_factory=ServerSettings)
    """Not sent to workers: it holds secrets, and is none of their business."""

    @property
    def devices(self) -> dict[str, tuple[DeviceSettings, LinkSettings]]:
        """All of them, by name."""
        links = (self.link, *self.other_links)
        return {d.name: (d, at) for d, at in zip((self.device, *self.others), links, strict=True)}

    @property
    def described(self) -> str:
        """What it is, in a line: ``8 models from 512MiB of cpu:0, balloon``."""
        n = len(self.models)
        budgets = [f"{format_bytes(d.budget_bytes)} of {d.name}" for d, _ in self.devices.values()]
        models = "1 model" if n == 1 else f"{n} models"
        return f"{models} from {', '.join(budgets)}, {self.preset}"

    @property
    def aliases(self) -> dict[str, tuple[str, ...]]:
        """Further names of each model and adapter that has any, by its own name."""
        served: list[ModelSettings | AdapterSettings] = []
        for model in self.models:
            served += (model, *model.adapters)
        return {s.name: s.aliases for s in served if s.aliases}

    @property
    def has_gpus(self) -> bool:
        """Whether any of its devices is a GPU."""
        return any(d.gpu is not None for d in (self.device, *self.others))

    def lending(
        self, reaches: Mapping[str, GpuReach | None], swapping: bool
    ) -> tuple[Capability, ...]:
        """Which of its devices, all of one host, can lend pages to which; `reaches`: of GPUs;
        `swapping`: whether its preset swaps KV layer by layer."""
        return capabilities(
            [
                Lendable(
                    d.name,
                    d.page_bytes,
                    _kind(d),
                    reach=reaches.get(d.name),
                    layered=swapping or d.kv_layout is KvLayout.PER_LAYER,
                )
                for d in (self.device, *self.others)
            ]
        )

    def of_one_device(self, what: str) -> DeviceSettings:
        """Its device. Raises ConfigError where there are several, which `what` cannot use."""
        if self.others:
            raise ConfigError("devices", list(self.devices), f"{what} takes one device so far")
        return self.device


def _kind(device: DeviceSettings) -> str:
    if device.tensor_parallel > 1:
        return GROUP
    return CPU if device.gpu is None else CUDA
