"""Define the fleet file's keys, types and ranges in pydantic; manual: `docs/fleet-file.md`.

Used to validate the fleet file, the admin API and the files of simulations. Checks single keys;
`fleet.cross_checks` checks rules across keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from ballast.core.levels import Levels, ModelLevels, level_fields
from ballast.core.sampling_defaults import SamplingDefaults
from ballast.core.settings import (
    GPU_PAGE,
    PRESET,
    STORY_BYTES,
    STORY_PARTS,
    AdapterSettings,
    DeviceSettings,
    HostsSettings,
    KeySettings,
    ModelSettings,
    PullSettings,
    Role,
    ServerSettings,
    Slo,
)
from ballast.fleet.field_types import (
    Bandwidth,
    Context,
    Count,
    DeviceName,
    Host,
    HubPattern,
    Name,
    Origin,
    PageSize,
    Placement,
    Positive,
    Secret,
    Size,
    SizeOrNone,
    Switch,
)


class Keys(BaseModel):
    """A mapping whose every key is known."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class SloKeys(Keys):
    """Service level, in seconds."""

    ttft: Positive = Slo().ttft
    tpot: Positive = Slo().tpot


class LiveLimitKeys(Keys):
    """Bounds on one model's requests."""

    running: Count = 64
    waiting: Annotated[int, Field(ge=0, lt=2**31)] = 10_000
    queue_seconds: Positive | None = None
    """A request that waited so long without being admitted fails."""


class LimitKeys(LiveLimitKeys):
    """Bounds on one model's requests and context."""

    context: Context | None = None
    """Most tokens of prompt and output together."""
    answer: Count | None = None
    """Most values of one answer: tokens of all choices, and alternatives of log-probabilities."""


class LiveKeys(Keys):
    """Keys that may change while a model serves."""

    slo: SloKeys = SloKeys()
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    share: Positive = 1.0
    limits: LiveLimitKeys = LiveLimitKeys()
    pinned: bool = False
    ttl: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Seconds without a request after which the model is evicted; None, 0: never."""
    guarantee: SizeOrNone = 0
    limit: Size | None = None
    """Bytes of each of its devices, weights included, that it can always have, and at most."""

    @property
    def levels(self) -> ModelLevels:
        return ModelLevels(
            slo=Slo(ttft=self.slo.ttft, tpot=self.slo.tpot),
            priority=self.priority,
            share=self.share,
            max_running=self.limits.running,
            max_waiting=self.limits.waiting,
            queue_seconds=self.limits.queue_seconds,
            pinned=self.pinned,
            ttl=self.ttl,
            guarantee=self.guarantee,
            limit=self.limit,
        )


class SamplingKeys(Keys):
    """Values for what a request leaves open; None: the checkpoint's, else the API's default."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    max_tokens: Count | None = None
    """Bound of the output in tokens."""

    def settings(self) -> SamplingDefaults:
        return SamplingDefaults(**self.model_dump())


class ModelKeys(LiveKeys):
    """Keys of one model; under `defaults`, of all models."""

    limits: LimitKeys = LimitKeys()
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    kv_dtype: Literal["auto", "int8"] = "auto"
    """`int8`: KV cache in 8 bits; changes outputs (docs/kv.md)."""
    block_tokens: Annotated[int, Field(ge=1, le=1024)] | None = None
    """None: about 16, such that blocks fill pages (`kv/layout.py`)."""
    preload: bool = False
    """Loaded first when the server starts."""
    model_impl: Literal["auto", "generic", "fused"] = "auto"
    linear: Literal["auto", "packed", "plain", "int8"] = "auto"
    tool_parser: Annotated[str, Field(min_length=1)] = "auto"
    expected_tokens: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Tokens per second that clients are expected to ask for; 0: unknown."""
    expected_longest: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Tokens of the longest request to expect; 0: the context."""
    sampling: SamplingKeys = SamplingKeys()
    devices: Annotated[tuple[DeviceName, ...], Field(strict=False)] = ()
    """Those that serve it; none: one, chosen by its size."""


ADAPTER_KEYS = ("name", "adapter", "base", "slo", "priority", "limits", "aliases")
"""Keys of an adapter; all others are those of its base model."""
ADAPTER_LIMITS = ("waiting", "queue_seconds")
"""The same, of `limits`."""


class NamedModelKeys(ModelKeys):
    """One entry of `models`: a checkpoint (`path`), or an adapter of another entry."""

    name: Name
    aliases: Annotated[tuple[Name, ...], Field(strict=False)] = ()
    path: Annotated[str | None, Field(min_length=1)] = None
    adapter: Annotated[str | None, Field(min_length=1)] = None
    base: str | None = None

    @field_validator("aliases")
    @classmethod
    def _named_once(cls, aliases: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        for i, alias in enumerate(aliases):
            if alias in (info.data.get("name"), *aliases[:i]):
                raise ValueError(f"the model would have the name {alias!r} twice; keep one")
        return aliases

    @property
    def names(self) -> tuple[str, ...]:
        """Every name by which clients may ask for it, its own first."""
        return (self.name, *self.aliases)

    def adapter_settings(self, directory: str) -> AdapterSettings:
        """Return the adapter's settings, with `directory` in place of a path or hub id."""
        return AdapterSettings(
            name=self.name,
            path=directory,
            aliases=self.aliases,
            **level_fields(self.levels, Levels),
        )

    def settings(self, directory: str, adapters: tuple[AdapterSettings, ...]) -> ModelSettings:
        """Return the model's settings, with `directory` in place of a path or hub id."""
        return ModelSettings(
            name=self.name,
            path=directory,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            expected_tokens=self.expected_tokens,
            expected_longest=self.expected_longest,
            max_model_len=self.limits.context,
            max_answer=self.limits.answer,
            block_tokens=self.block_tokens,
            preload=self.preload,
            model_impl=self.model_impl,
            linear=self.linear,
            adapters=adapters,
            tool_parser=self.tool_parser,
            sampling=self.sampling.settings(),
            devices=self.devices,
            aliases=self.aliases,
            **level_fields(self.levels),
        )


class DeviceKeys(Keys):
    """One entry of `devices`."""

    name: DeviceName | None = None
    """None: `cpu:` and its place among the devices; `cuda:N`: a GPU, as CUDA counts."""
    budget: Size
    page: PageSize | None = None
    """None: by the models' sizes (`weights/page_size.py`), 2 MiB or 256 KiB; of a GPU, 2 MiB."""
    keep_free: SizeOrNone | None = None
    """None: all free pages keep their memory."""
    threads: Count | None = None
    lanes: Count = 1
    step_tokens: Count = 512
    step_logits: Count = 64
    prefix_cache: bool = True
    role: Annotated[Role, Field(strict=False)] = Role.BOTH
    invariant: Switch | None = None
    """None: the device's default. Of GPUs only."""
    graphs: SizeOrNone | None = None
    """None: 256 MiB on a GPU."""
    tensor_parallel: Count = 1
    exchange: Literal["shared", "gloo"] | None = None
    """None: in shared memory."""

    def settings(self, position: int) -> DeviceSettings:
        """Return the settings of the device at `position` of the list, counted from 0."""
        name = self.name or f"cpu:{position}"
        plain = DeviceSettings(name=name, budget_bytes=self.budget)
        return replace(
            plain,
            page_bytes=self.page or (plain.page_bytes if plain.gpu is None else GPU_PAGE),
            page_given=self.page is not None,
            keep_free=self.keep_free,
            threads=self.threads,
            lanes=self.lanes,
            step_tokens=self.step_tokens,
            step_logits=self.step_logits,
            prefix_cache=self.prefix_cache,
            role=self.role,
            graphs=self.graphs,
            invariant=self.invariant,
            tensor_parallel=self.tensor_parallel,
            exchange=self.exchange or plain.exchange,
        )


class LinkKeys(Keys):
    """One entry of `links`: host tier to one device."""

    device: str | None = None
    """None: every device that no other link names."""
    bandwidth: Bandwidth | None = None
    """Bytes per second; None: unpaced."""
    mixed: Bandwidth | None = None
    """Bytes a second of both directions together; None: as one direction alone."""
    shared: bool = False
    """Whether its devices have this bandwidth together, not each."""
    peer: Bandwidth | None = None
    """Bytes per second, in either direction, at which devices read what others lend them, all
    together; None: unpaced."""


class ApiKeyKeys(Keys):
    """One entry of `server.keys`."""

    name: Name
    key: Secret = Field(repr=False)
    models: Annotated[tuple[Name, ...], Field(strict=False)] | None = None
    """None: all."""
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    concurrent: Count | None = None
    answer: Count | None = None
    """None: as the model's `limits.answer`."""
    activations_per_minute: Count | None = None
    """None: 30 where there are several keys."""
    isolated: bool | None = None
    """None: true where there are several keys."""
    priority: Annotated[int, Field(ge=0, lt=2**31)] = 0

    def settings(self) -> KeySettings:
        return KeySettings(
            name=self.name,
            key=self.key,
            models=self.models,
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            concurrent=self.concurrent,
            max_answer=self.answer,
            activations_per_minute=self.activations_per_minute,
            isolated=self.isolated,
            priority=self.priority,
        )


class PullKeys(Keys):
    """`server.pull`: what clients may have downloaded from the hub."""

    models: Annotated[tuple[HubPattern, ...], Field(strict=False)] = ()
    most_bytes: Size = PullSettings().most_bytes
    most_models: Count = PullSettings().most_models


class ServerKeys(Keys):
    """`server`: what concerns clients and operators."""

    keys: list[ApiKeyKeys] = Field(default_factory=list)
    admin_key: Secret | None = Field(default=None, repr=False)
    pull: PullKeys = PullKeys()
    cors_origins: Annotated[tuple[Origin, ...], Field(strict=False)] = ()
    hosts: Annotated[tuple[Host, ...], Field(strict=False)] = ()
    most_open: Count = ServerSettings().most_open
    most_connections: Count = ServerSettings().most_connections
    most_connections_each: Count | None = ServerSettings().most_connections_each
    most_body: Size = ServerSettings().most_body_bytes
    most_answers: Size = ServerSettings().most_answer_bytes
    ping_seconds: Positive = ServerSettings().ping_seconds
    send_seconds: Positive = ServerSettings().send_seconds
    drain_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = (
        ServerSettings().drain_seconds
    )
    silent_seconds: Positive = ServerSettings().silent_seconds
    starting_seconds: Positive = ServerSettings().starting_seconds
    stuck_seconds: Positive = ServerSettings().stuck_seconds
    loading_seconds: Positive = ServerSettings().loading_seconds
    deprecated_metrics: bool = ServerSettings().deprecated_metrics
    request_texts: bool = ServerSettings().request_texts
    spare_worker: bool = ServerSettings().spare_worker

    def settings(self) -> ServerSettings:
        same = self.model_dump(exclude={"keys", "pull", "most_body", "most_answers"})
        return ServerSettings(
            keys=tuple(key.settings() for key in self.keys),
            pull=PullSettings(**self.pull.model_dump()),
            most_body_bytes=self.most_body,
            most_answer_bytes=self.most_answers,
            **same,
        )


class KvDiskKeys(Keys):
    """`kv_disk`: a directory in which KV outlives the server."""

    path: Annotated[str, Field(min_length=1)]
    bytes: Size


class HostsKeys(Keys):
    """`hosts`: where devices are, if not all on this machine."""

    ray: str = ""
    http: Annotated[int, Field(ge=1, le=65535)] | None = None
    fleet: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{0,64}$")] = ""
    least: Count | None = None
    devices: Count = HostsSettings().devices
    network: Bandwidth | None = None


class FleetKeys(Keys):
    """The whole file."""

    preset: str = PRESET
    options: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field(default_factory=dict)
    placement: Placement | None = None
    story: str | None = None
    story_bytes: Size = STORY_BYTES
    story_parts: Count = STORY_PARTS
    kv_host: SizeOrNone = 0
    """Host memory for KV that leaves devices; 0: none."""
    kv_disk: KvDiskKeys | None = None
    """None: no KV outlives the server."""
    hosts: HostsKeys | None = None
    """None: all devices are on this machine."""
    defaults: ModelKeys = ModelKeys()
    models: Annotated[list[NamedModelKeys], Field(min_length=1)]
    devices: Annotated[list[DeviceKeys], Field(min_length=1)]
    links: list[LinkKeys] = Field(default_factory=list)
    server: ServerKeys = ServerKeys()

    def device_settings(self) -> list[DeviceSettings]:
        """The settings of all devices, in the file's order."""
        return [device.settings(i) for i, device in enumerate(self.devices)]


class SimulatedFleetKeys(FleetKeys):
    """Keys of a fleet file that is simulated: its devices may come from the command line."""

    devices: list[DeviceKeys] = Field(default_factory=list)
