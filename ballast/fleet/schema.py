"""The fleet file's keys, types and ranges. `docs/fleet-file.md` says the same to its users."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ballast.core.settings import AdapterSettings, DeviceSettings, ModelSettings, Slo
from ballast.core.units import parse_bytes

OS_PAGE = 4096


def _size(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("a size is needed, for example 512MiB, 2GB or 1048576")
    return parse_bytes(value)


def _bandwidth(value: Any) -> float:
    if isinstance(value, float):
        return value
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("a bandwidth is needed, for example 4GB/s")
    return float(parse_bytes(value))


def _page(value: Any) -> int:
    size = _size(value)
    if size < OS_PAGE or size & (size - 1):
        raise ValueError("a page is a power of two of at least 4KiB, for example 256KiB or 2MiB")
    return size


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Size = Annotated[int, BeforeValidator(_size), Field(gt=0)]
PageSize = Annotated[int, BeforeValidator(_page)]
Bandwidth = Annotated[float, BeforeValidator(_bandwidth), Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class Keys(BaseModel):
    """A mapping whose every key is known."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class SloKeys(Keys):
    """Service level, in seconds."""

    ttft: Positive = Slo().ttft
    tpot: Positive = Slo().tpot


class LimitKeys(Keys):
    """Bounds on one model's requests and context."""

    context: Count | None = None
    """Most tokens of prompt and output together."""
    running: Count = 64
    waiting: Annotated[int, Field(ge=0)] = 10_000


class ModelKeys(Keys):
    """What may be said of one model; under `defaults`, of all."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    slo: SloKeys = SloKeys()
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    share: Positive = 1.0
    limits: LimitKeys = LimitKeys()
    block_tokens: Annotated[int, Field(ge=1, le=1024)] = 16
    pinned: bool = False
    model_impl: Literal["auto", "generic", "fused"] = "auto"
    linear: Literal["auto", "packed", "plain"] = "auto"


ADAPTER_KEYS = ("name", "adapter", "base", "slo", "priority", "limits")
"""What may be said of an adapter; the rest is its base's. Of `limits`, only `waiting`."""


class NamedModelKeys(ModelKeys):
    """One entry of `models`: a checkpoint (`path`), or an adapter of another entry."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$", max_length=128)]
    path: Annotated[str | None, Field(min_length=1)] = None
    adapter: Annotated[str | None, Field(min_length=1)] = None
    base: str | None = None

    def adapter_settings(self, directory: str) -> AdapterSettings:
        """With `directory` in place of a path or hub id."""
        return AdapterSettings(
            name=self.name,
            path=directory,
            slo=Slo(ttft=self.slo.ttft, tpot=self.slo.tpot),
            priority=self.priority,
            max_waiting=self.limits.waiting,
        )

    def settings(self, directory: str, adapters: tuple[AdapterSettings, ...]) -> ModelSettings:
        """With `directory` in place of a path or hub id."""
        return ModelSettings(
            name=self.name,
            path=directory,
            dtype=self.dtype,
            slo=Slo(ttft=self.slo.ttft, tpot=self.slo.tpot),
            priority=self.priority,
            share=self.share,
            max_model_len=self.limits.context,
            max_running=self.limits.running,
            max_waiting=self.limits.waiting,
            block_tokens=self.block_tokens,
            pinned=self.pinned,
            model_impl=self.model_impl,
            linear=self.linear,
            adapters=adapters,
        )


class DeviceKeys(Keys):
    """One entry of `devices`."""

    name: Annotated[str, Field(min_length=1)] = "cpu:0"
    budget: Size
    page: PageSize = 256 * 1024
    threads: Count | None = None
    step_tokens: Count = 512
    step_logits: Count = 64
    prefix_cache: bool = True

    def settings(self) -> DeviceSettings:
        return DeviceSettings(
            name=self.name,
            budget_bytes=self.budget,
            page_bytes=self.page,
            threads=self.threads,
            step_tokens=self.step_tokens,
            step_logits=self.step_logits,
            prefix_cache=self.prefix_cache,
        )


class LinkKeys(Keys):
    """One entry of `links`: host tier to one device."""

    device: str | None = None
    """None: the only device."""
    bandwidth: Bandwidth | None = None
    """Bytes per second; None: unpaced."""


class FleetKeys(Keys):
    """The whole file."""

    preset: str = "balloon"
    options: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field(default_factory=dict)
    story: str | None = None
    defaults: ModelKeys = ModelKeys()
    models: Annotated[list[NamedModelKeys], Field(min_length=1)]
    devices: Annotated[list[DeviceKeys], Field(min_length=1)]
    links: list[LinkKeys] = Field(default_factory=list)
