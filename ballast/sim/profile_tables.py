"""Define the tables of a profile file: engines, link, page calls, measured models and devices.

Pydantic schemas, used by `sim.profile`.
"""

from __future__ import annotations

from pydantic import Field

from ballast.core.link import LinkRates
from ballast.fleet.field_types import Name, Positive
from ballast.fleet.schema import Keys
from ballast.sim.page_costs import PageCosts
from ballast.sim.peer_costs import PeerCosts
from ballast.sim.roofline import Derate, EngineHostCosts
from ballast.sim.toml_file import Finite, NotNegative, Size


class CostCoefficients(Keys):
    """Coefficients of `core.cost.StepCosts`, in seconds. Without those of tokens and pairs the
    prefill was not measured."""

    base: NotNegative
    per_sequence: NotNegative
    per_context: NotNegative
    per_tile: NotNegative = 0.0
    per_token: NotNegative | None = None
    per_pair: NotNegative | None = None
    per_chunk: NotNegative = 0.0
    floor: NotNegative = 0.0
    hidden: Finite = 0.0
    expert_reading: NotNegative = 0.0
    not_chosen: NotNegative = 0.0


class MeasuredModel(Keys):
    """One model as measured on the device."""

    model: Name
    source: str
    """Name of the row's source, among the file's sources."""
    tp: Size = 1
    """Devices that share the model: costs are those of the group."""
    sm_percent: Size = 100
    """Share of the multiprocessors it ran on, alone on the device."""
    costs: CostCoefficients
    prefill_error: NotNegative | None = None
    """Mean relative error of the fit over its points, in per cent."""
    decode_error: NotNegative | None = None


class MeasurementSource(Keys):
    """Where rows come from."""

    artifact: str
    licence: str
    engine: Name | None = None
    """Which of the file's engines served the models: its host's work is part of the costs. None:
    kernels were measured, without an engine."""
    note: str = ""


class EngineProfile(Keys):
    """An engine that serves models on the device. Its rows are measured; costs of other models come
    from its derate, or from its host's work and the reach of kernels (`DeviceProfile.reach`)."""

    served_by: str
    """The software, in words."""
    overhead_seconds: NotNegative = 0.0
    """Seconds of the engine's own work per job, beyond the fitted costs."""
    wake_seconds: NotNegative = 0.0
    """Further seconds of a job after a pause, those of the loop's turn included."""
    settling_seconds: list[NotNegative] = Field(default_factory=list)
    """Further seconds of the first, second, ... decode step after a prefill."""
    switch_seconds: NotNegative = 0.0
    """Further seconds of a job right after one of another model."""
    switch_back_seconds: NotNegative | None = None
    """The same where the job's own model ran a few milliseconds before; None: as long."""
    turn_seconds: NotNegative = 0.0
    """Further seconds of a job for each turn of the loop with events while it runs."""
    answer_seconds: NotNegative = 0.0
    """Seconds from a request's receipt to the loop's turn, and from a turn's begin to the
    client."""
    spread: list[Positive] = Field(default_factory=list)
    """Quantiles of measured over fitted job durations, equally likely, with a mean of 1."""
    prefill_first: bool = False
    """Whether prompts are computed in jobs of their own before its models decode on: the option
    `separate` of the compute policies that have it."""
    host: EngineHostCosts | None = None
    derate: Derate | None = None
    """Device and host in one, as fits of this engine's jobs show them."""
    source: str = ""
    """Where `host` comes from."""
    not_held: str = ""
    """What no run of it has been held against, or was found to be off, in words."""
    assumed: list[str] = Field(default_factory=list)
    """Keys of `host` that are assumed, not measured."""


class LinkProfile(Keys):
    """Bandwidths of the link to the host, in bytes per second, as copies reach them."""

    to_device: Positive
    """While nothing goes the other way."""
    to_host: Positive
    to_device_mixed: Positive
    """While both directions carry."""
    to_host_mixed: Positive
    source: str
    assumed: list[str] = Field(default_factory=list)
    """Keys that are assumed, without a known measurement on such a link."""

    @property
    def rates(self) -> LinkRates:
        return LinkRates(self.to_device, self.to_host, self.to_device_mixed, self.to_host_mixed)


class PageCallCosts(Keys):
    """Seconds per page of mapping calls."""

    map_seconds: NotNegative
    """The loop's, to map it and make it accessible."""
    unmap_seconds: NotNegative
    """The loop's, to unmap it."""
    beside_seconds: NotNegative = 0.0
    """Further seconds per page of an activation, beyond mapping and copying."""
    kv: bool = True
    """Whether pages of KV cost the same. False: job costs include it."""
    source: str

    @property
    def costs(self) -> PageCosts:
        return PageCosts(
            map=self.map_seconds, unmap=self.unmap_seconds, beside=self.beside_seconds, kv=self.kv
        )


class PeerProfile(Keys):
    """Costs between devices of this kind on one server, as `sim.peer_costs.PeerCosts`."""

    message_seconds: Positive
    start_seconds: NotNegative
    cold_start_seconds: NotNegative
    prepare_seconds: NotNegative
    read_bytes_per_second: Positive
    home_bytes_per_second: Positive
    borrow_seconds: NotNegative
    """Of a page."""
    give_back_seconds: NotNegative
    source: str

    @property
    def costs(self) -> PeerCosts:
        return PeerCosts(
            message=self.message_seconds,
            start=self.start_seconds,
            cold_start=self.cold_start_seconds,
            prepare=self.prepare_seconds,
            read=self.read_bytes_per_second,
            home=self.home_bytes_per_second,
            borrow=self.borrow_seconds,
            give_back=self.give_back_seconds,
        )

    @classmethod
    def of(cls, costs: PeerCosts) -> PeerProfile:
        """Build the table of costs that have all been measured."""
        assert costs.read is not None
        assert costs.borrow is not None
        assert costs.give_back is not None
        return cls(
            message_seconds=costs.message,
            start_seconds=costs.start,
            cold_start_seconds=costs.cold_start,
            prepare_seconds=costs.prepare,
            read_bytes_per_second=costs.read,
            home_bytes_per_second=costs.home,
            borrow_seconds=costs.borrow,
            give_back_seconds=costs.give_back,
            source="calibrate",
        )


class MeasuredDevice(Keys):
    """Settings of the device on which the profile was measured."""

    budget_bytes: Size
    page_bytes: Size
    step_tokens: Size
    step_logits: Size


class HeldRuns(Keys):
    """How far simulations of an engine were from published runs of it: simulated over measured,
    less one, of runs' means."""

    engine: Name
    tp: Size
    """Devices of a group."""
    runs: Size
    ttft: Finite
    """Of the time to the first token, the median of the runs."""
    ttft_worst: Finite
    tpot: Finite
    """Of the time per further token, the median of the runs."""
    tpot_worst: Finite
    source: str
    """Whose runs."""


class MeasuredCapacity(Keys):
    """The highest rate at which service levels were kept, live on the device and simulated."""

    preset: Name
    live: Positive
    """In any unit that the simulated one has, too."""
    simulated: Positive
    source: str
    """Description of the measurement."""
