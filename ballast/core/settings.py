"""Define the frozen settings of a fleet: its models, devices, links, API keys and server.

Built from the fleet file and the command line, passed to all components and sent to workers. Never
changed in place: commands derive new settings by `dataclasses.replace`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ballast.core.capability import CPU, CUDA, GROUP, Capability, GpuReach, Lendable, capabilities
from ballast.core.errors import ConfigError
from ballast.core.kv_tiers import KvTierSettings
from ballast.core.levels import Levels, ModelLevels
from ballast.core.levels import Slo as Slo
from ballast.core.link import LinkSettings as LinkSettings
from ballast.core.sampling_defaults import SamplingDefaults
from ballast.core.units import KiB, MiB, format_bytes

PRESET = "ballast"  # of a fleet that names none
GPU_PAGE = 2 * MiB
"""Mapping granularity of all GPU drivers so far; the device checks that it suffices."""
INVARIANT = False  # of a GPU, by default
STORY_BYTES, STORY_PARTS = 1024 * MiB, 8
GRAPH_BYTES = 256 * MiB  # for CUDA graphs, by default


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings(Levels):
    """A LoRA adapter, served as a model of its own on the weights of its base."""

    name: str
    path: str
    """Directory with adapter_config.json and adapter_model.safetensors (PEFT's format)."""
    aliases: tuple[str, ...] = ()
    """Further names that clients may use for it."""
    fault: str = ""
    """Why its directory cannot be had, so that it is not served; empty: nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings(ModelLevels):
    """One model of the fleet."""

    name: str
    path: str
    """Directory of a checkpoint: config.json, *.safetensors, tokenizer files."""
    dtype: str = "auto"
    """`auto` (the checkpoint's), `float32` or `bfloat16`."""
    kv_dtype: str = "auto"
    """Element type of its KV cache: `auto`, that of `dtype`, or `int8`."""
    expected_tokens: float = 0.0
    """Tokens per second, of prompts and outputs, that clients are expected to ask for; 0:
    unknown. Where not all models have a place, those with more have one."""
    expected_longest: int = 0
    """Tokens of the longest request to expect, prompt and output together; 0: the context."""
    max_model_len: int | None = None
    """Bound of the tokens of prompt and output together; None: the architecture's."""
    max_answer: int | None = None
    """Bound of the values of one answer: tokens, and alternatives of log-probabilities; None: the
    server's."""
    block_tokens: int | None = None  # None: about 16, such that blocks fill pages
    preload: bool = False
    """Whether a server that starts loads it before the models without this setting."""
    model_impl: str = "auto"
    """Code that runs it: `generic` (any family), `fused` (Llama-shaped ones, faster), or `auto`."""
    linear: str = "auto"
    """Layout of its matrices in memory: `packed` for the CPU's kernels, `plain`, or `auto`."""
    adapters: tuple[AdapterSettings, ...] = ()
    tool_parser: str = "auto"
    """Syntax of its tool calls (a name of `ballast.server.tools`); `auto`: by its template."""
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    """Values for what requests leave open, before the checkpoint's own."""
    devices: tuple[str, ...] = ()
    """Devices that serve it, each with the whole model; empty: one is chosen by its size."""
    aliases: tuple[str, ...] = ()
    """Further names that clients may use for it."""
    fault: str = ""
    """Why its directory cannot be had, so that it is not served; empty: nothing is known."""

    @property
    def names(self) -> frozenset[str]:
        """All names that clients may use for the model and its adapters."""
        served: tuple[ModelSettings | AdapterSettings, ...] = (self, *self.adapters)
        return frozenset(name for s in served for name in (s.name, *s.aliases))


class Role(StrEnum):
    """Phase of requests that a device computes (disaggregated prefill, as in DistServe: Zhong et
    al., OSDI 2024)."""

    BOTH = "both"
    PREFILL = "prefill"
    """Prefill up to the first token; the request then moves, with its KV, to a decoding device."""
    DECODE = "decode"
    """Decode of requests that come from prefill devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSettings:
    """One device and its budget."""

    name: str = "cpu:0"
    budget_bytes: int
    """All memory the device may use: weights, KV cache and activations together."""
    page_bytes: int = 256 * KiB
    page_given: bool = True
    """Whether `page_bytes` was chosen explicitly; else the models' sizes decide
    (`weights/page_size.py`)."""
    keep_free: int | None = None
    """Bytes of free pages that keep their memory; that of others goes back to the machine. None:
    all keep it."""
    threads: int | None = None
    """Intra-op threads; None: all cores, or an equal share of those that other devices leave."""
    lanes: int = 1
    """Bound of jobs, of different models, that run at the same time; they divide the threads."""
    step_tokens: int = 512
    """Bound of the tokens computed in one job (prefill chunks and decodes together)."""
    step_logits: int = 64
    """Bound of the positions sampled in one job, and so of the logits in the activation arena."""
    prefix_cache: bool = True
    graphs: int | None = None
    """Bound of the bytes of CUDA graphs, part of the budget; None: `GRAPH_BYTES` on a GPU; 0: no
    graphs."""
    invariant: bool | None = None
    """Whether a row's result in 16 bits may depend on no other row of its job, so that no text
    depends on what else is served; None: `INVARIANT` on a GPU, on a CPU where it costs little."""
    role: Role = Role.BOTH
    tensor_parallel: int = 1
    """Number of ranks (processes) that share the device's models, memory and link equally."""
    exchange: str = "shared"
    """Collectives of ranks on CPUs: by `shared` memory, or by `gloo` without shared memory."""

    @property
    def gpu(self) -> int | None:
        """CUDA ordinal of the GPU in this process; None: the device is this machine's CPU."""
        kind, _, number = self.name.partition(":")
        return int(number) if kind == CUDA and number.isdecimal() else None

    @property
    def meets_in_memory(self) -> bool:
        """Whether its ranks exchange tensors in shared memory."""
        return self.exchange == "shared"

    @property
    def rotates(self) -> bool:
        """Whether layers can rotate on the device: not if they are split over ranks."""
        return self.tensor_parallel == 1

    @property
    def is_invariant(self) -> bool:
        """Whether a GPU computes rows independently of each other."""
        wanted = INVARIANT if self.invariant is None else self.invariant
        return wanted and self.gpu is not None

    @property
    def graph_bytes(self) -> int:
        """Bytes set aside for CUDA graphs; 0 on a CPU."""
        if self.gpu is None:
            return 0
        return GRAPH_BYTES if self.graphs is None else self.graphs

    @property
    def parts(self) -> int:
        """Number of equal parts of its compute, which jobs on several lanes divide."""
        return self.lanes if self.threads is None else self.threads


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySettings:
    """Permissions and limits of one API key."""

    name: str
    """Name for logs and metrics; never the key itself."""
    key: str = field(repr=False)
    models: tuple[str, ...] | None = None
    """Models that it may use; None: all."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Bound of prompt and output tokens together."""
    concurrent: int | None = None
    """Bound of its open requests."""
    max_answer: int | None = None
    """Bound of the values of one of its answers, where it is below the model's."""
    activations_per_minute: int | None = None
    """Bound of the models that its requests have activated, on each device; None: by default."""
    isolated: bool | None = None
    """Whether its prefix cache is separate from other keys'; None: if there are several keys."""
    priority: int = 0
    """Upper bound of the priority that its requests may set; lower ones are always allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSettings:
    """Models that clients may have downloaded from the hub, by Ollama's `/api/pull`."""

    models: tuple[str, ...] = ()
    """Patterns of hub ids (`org/*`); empty: none."""
    most_bytes: int = 20 * 1024 * MiB
    """Bound of the files of one model."""
    most_models: int = 16
    """Bound of the models that are added to the fleet file's while the server runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of the HTTP server and of its supervision of workers."""

    keys: tuple[KeySettings, ...] = ()
    """API keys; empty: none is required."""
    admin_key: str | None = field(default=None, repr=False)
    """Key of the admin routes; None: there are no admin routes."""
    pull: PullSettings = field(default_factory=PullSettings)
    cors_origins: tuple[str, ...] = ()
    """Origins (`scheme://host[:port]`, or `*`: any) whose pages browsers let read responses."""
    hosts: tuple[str, ...] = ()
    """Names of the server, beside loopback and addresses; empty: with keys any, else no other."""
    most_open: int = 4096
    """Bound of the open generating requests; more are refused (429)."""
    most_connections: int = 8192
    """Bound of the connections; beyond it, generating requests are refused (429), and after any
    other request the connection is closed. Lowered if the process may open fewer files."""
    most_connections_each: int | None = None
    """Bound of the connections of one client address; None: half of all. Behind a reverse proxy all
    clients have the proxy's."""
    most_body_bytes: int = 8 * MiB
    """Bound of a request body; a longer one is refused (413). Decoding one delays all clients."""
    most_answer_bytes: int = 512 * MiB
    """Bound of the memory of all answers that are collected to be sent whole."""
    ping_seconds: float = 5.0
    """Idle time of a stream after which the server sends `: ping`."""
    send_seconds: float = 60.0
    """Time after which a client that reads nothing of its response is disconnected."""
    drain_seconds: float = 30.0
    """Time for open requests to end after SIGTERM."""
    silent_seconds: float = 20.0
    """Time without a message or processor time after which a worker is killed and restarted."""
    starting_seconds: float = 120.0
    """The same for a worker that starts."""
    stuck_seconds: float = 300.0
    """Time of a job, of the loop's turn or of silent computing after which a worker is killed."""
    loading_seconds: float = 600.0
    """Time without progress of loading, or of computing without a message, after which a starting
    worker is killed."""
    deprecated_metrics: bool = False
    """Whether `/metrics` has the names of earlier releases as well."""
    request_texts: bool = False
    """Whether the admin key may see the ends of the last requests' prompts and outputs."""
    spare_worker: bool = True
    """Whether a process with its libraries loaded waits to replace a worker that dies."""

    @property
    def several_keys(self) -> bool:
        """Whether there are several keys, which then have fair shares of the workers."""
        return len(self.keys) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsSettings:
    """Hosts of the devices, where these are on many."""

    ray: str = ""
    """Address of the Ray cluster that places devices; empty: all are on this host, or simulated."""
    http: int | None = None
    """Port at which each host of the cluster answers HTTP; None: the server's own alone."""
    fleet: str = ""
    """Name of this fleet among those on the cluster; empty: derived from the file's path."""
    least: int | None = None
    """Devices, the first of the fleet, that always serve; the others are on standby: they serve
    while load asks for them. None: all."""
    devices: int = 1
    """Simulated devices on each host."""
    network: float | None = None
    """Bytes per second at which a host receives weights that it does not have, and KV of requests,
    for fleet policies and in simulations; None: at once (KV in simulations: not at all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """Settings of everything that a server serves: models, devices, policies and the server."""

    models: tuple[ModelSettings, ...]
    device: DeviceSettings
    """The first device; the only one if there are no `others`."""
    link: LinkSettings = field(default_factory=LinkSettings)
    others: tuple[DeviceSettings, ...] = ()
    """Further devices of this host."""
    other_links: tuple[LinkSettings, ...] = ()
    """Links of `others`, in their order."""
    placement: str | None = None
    """Name of the fleet policy: whether models follow the load; None: the preset's."""
    preset: str = PRESET
    options: dict[str, float] = field(default_factory=dict)
    """Tunables of the preset; an unknown name is a ConfigError."""
    home: str = "."
    """The fleet file's directory, against which relative paths of models added later resolve."""
    story_path: str | None = None
    """File for every event and decision as JSON lines; None: only a ring in memory."""
    story_bytes: int = STORY_BYTES
    """Size at which a part of the story ends and the next begins; a line is never cut."""
    story_parts: int = STORY_PARTS
    """Number of older parts that are kept, beside the one being written."""
    kv: KvTierSettings = field(default_factory=KvTierSettings)
    hosts: HostsSettings | None = None
    server: ServerSettings = field(default_factory=ServerSettings)
    """Settings of the server; not sent to workers, since they hold secrets."""

    @property
    def devices(self) -> dict[str, tuple[DeviceSettings, LinkSettings]]:
        """All devices with their links, by name."""
        links = (self.link, *self.other_links)
        return {d.name: (d, at) for d, at in zip((self.device, *self.others), links, strict=True)}

    @property
    def standby(self) -> tuple[str, ...]:
        """Names of the devices that serve only while load asks for them."""
        least = None if self.hosts is None or not self.hosts.ray else self.hosts.least
        return () if least is None else tuple(self.devices)[least:]

    @property
    def own_names(self) -> set[str]:
        """The own names of the models and their adapters."""
        return {m.name for m in self.models} | {a.name for m in self.models for a in m.adapters}

    def named(self, name: str) -> ModelSettings | AdapterSettings | None:
        """Return the model or adapter of that name of its own; None if there is none."""
        models: list[ModelSettings | AdapterSettings] = [*self.models]
        adapters = (a for m in self.models for a in m.adapters)
        return next((s for s in (*models, *adapters) if s.name == name), None)

    @property
    def described(self) -> str:
        """Summary in one line: ``8 models from 512MiB of cpu:0, ballast``."""
        n = len(self.models)
        budgets = [f"{format_bytes(d.budget_bytes)} of {d.name}" for d, _ in self.devices.values()]
        models = "1 model" if n == 1 else f"{n} models"
        return f"{models} from {', '.join(budgets)}, {self.preset}"

    @property
    def entries(self) -> list[ModelSettings | AdapterSettings]:
        """All models, each before its adapters."""
        found: list[ModelSettings | AdapterSettings] = []
        for model in self.models:
            found += (model, *model.adapters)
        return found

    @property
    def aliases(self) -> dict[str, tuple[str, ...]]:
        """Aliases of each model and adapter that has any, by its own name."""
        return {entry.name: entry.aliases for entry in self.entries if entry.aliases}

    @property
    def faults(self) -> dict[str, str]:
        """Why models and adapters cannot be had, by own name; empty where nothing is known."""
        return {entry.name: entry.fault for entry in self.entries if entry.fault}

    @property
    def has_gpus(self) -> bool:
        """Whether any of its devices is a GPU."""
        return any(d.gpu is not None for d in (self.device, *self.others))

    def lending(
        self, reaches: Mapping[str, GpuReach | None], hosts: Mapping[str, str] | None = None
    ) -> tuple[Capability, ...]:
        """Return which of its devices can lend pages to which.

        `reaches`: reports of GPUs by device; `hosts`: hosts by device; None: all are on one.
        """
        at = {} if hosts is None else hosts
        return capabilities(
            [
                Lendable(d.name, d.page_bytes, _kind(d), at.get(d.name, ""), reaches.get(d.name))
                for d in (self.device, *self.others)
            ]
        )

    def of_one_device(self, what: str) -> DeviceSettings:
        """Return the only device. Raises ConfigError if there are several, which `what` (a noun
        phrase) does not support."""
        if self.others:
            raise ConfigError("devices", list(self.devices), f"{what} takes one device so far")
        return self.device


def _kind(device: DeviceSettings) -> str:
    if device.tensor_parallel > 1:
        return GROUP
    return CPU if device.gpu is None else CUDA
