"""Load device profiles, which hold the costs of jobs, from `profiles/*.toml` or a user's file.

A file holds a device's peaks, the fraction of them that kernels reach, the engines that serve
there, and fitted coefficients of models that were measured under one of these, with their sources.
`ballast/sim/profiles/` has one for each public device with known figures. `DeviceProfile` yields
the `MachineProfile` that `SimDevice` runs on.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import asdict, replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from pydantic import Field, ValidationInfo, field_validator

from ballast import __version__
from ballast.core.cost import StepCosts
from ballast.core.errors import ConfigError
from ballast.core.model import ModelSpec
from ballast.core.settings import DeviceSettings
from ballast.fleet.faults import unknown
from ballast.fleet.field_types import Name, Positive
from ballast.fleet.schema import Keys
from ballast.sim.in_place import InPlaceMachine
from ballast.sim.job_spread import JobSpread
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.model_catalogue import catalogue, facts, shape_of
from ballast.sim.peer_costs import ASSUMED
from ballast.sim.profile_tables import (
    CostCoefficients,
    EngineProfile,
    HeldRuns,
    LinkProfile,
    MeasuredCapacity,
    MeasuredDevice,
    MeasuredModel,
    MeasurementSource,
    PageCallCosts,
    PeerProfile,
)
from ballast.sim.roofline import AllReduce, Hardware, KernelReach, Sizes, roofline, step_costs
from ballast.sim.toml_file import NotNegative, read_keys

CATALOGUE = "models.toml"
OWN = "ballast"
"""The engine of profiles that this project's own engine was measured for."""
OVER_HTTP = "ballast-http"
"""The same behind a server, with the client on the same machine."""
_FOLDER = resources.files("ballast.sim") / "profiles"


class DeviceProfile(Keys):
    """Contents of a profile file."""

    device: Name
    engine: Name
    """Name of the engine, among `engines`, that serves."""
    page_seconds: NotNegative = 0.0
    """Seconds per page of an activation beyond its copy, in all."""
    page_source: str = ""
    lane_reach: Positive = 1.0
    """Most memory bandwidth that a part of the compute can use, in multiples of that part."""
    copies_slow: NotNegative = 0.0
    """Fraction by which a job is slower while bytes move over the link to the host."""
    early_jobs: bool = False
    """Whether a model's first job begins while its last layers arrive."""
    link: LinkProfile
    pages: PageCallCosts | None = None
    """Costs of mapping calls in the loop's time, a part of `page_seconds`; None: no such costs."""
    peers: PeerProfile | None = None
    """Costs between devices of one server; None: assumptions."""
    served: MeasuredDevice | None = None
    """Without it, and with `hardware`, a cluster's devices are as `sim.cluster` says."""
    hardware: Hardware | None = None
    reach: KernelReach | None = None
    engines: dict[str, EngineProfile]
    sources: dict[str, MeasurementSource] = Field(default_factory=dict)
    measured: list[MeasuredModel] = Field(default_factory=list)
    all_reduce: list[AllReduce] = Field(default_factory=list)
    capacity: list[MeasuredCapacity] = Field(default_factory=list)
    """Capacities that were measured both live and simulated."""
    held: list[HeldRuns] = Field(default_factory=list)
    """Published runs on this device that simulations were held against."""

    @property
    def capacity_errors(self) -> dict[str, float]:
        """By preset, how far its highest simulated rate was from the live one: 0.1 is 10 % more."""
        return {row.preset: row.simulated / row.live - 1 for row in self.capacity}

    @field_validator("engines")
    @classmethod
    def _serves(
        cls, engines: dict[str, EngineProfile], info: ValidationInfo
    ) -> dict[str, EngineProfile]:
        engine = info.data.get("engine")
        if engine is not None and engine not in engines:
            raise ValueError(f"the engine is {engine!r}, of which nothing is here")
        return engines

    @field_validator("sources")
    @classmethod
    def _served(
        cls, sources: dict[str, MeasurementSource], info: ValidationInfo
    ) -> dict[str, MeasurementSource]:
        known = info.data.get("engines", {})
        for name, source in sources.items():
            if known and source.engine is not None and source.engine not in known:
                raise ValueError(
                    f"{name}: engine {source.engine!r}; {unknown(source.engine, known)}"
                )
        return sources

    @field_validator("measured")
    @classmethod
    def _sourced(cls, measured: list[MeasuredModel], info: ValidationInfo) -> list[MeasuredModel]:
        known = info.data.get("sources", {})
        for row in measured:
            if known and row.source not in known:
                raise ValueError(
                    f"{row.model}: source {row.source!r}; {unknown(row.source, known)}"
                )
        return measured

    @property
    def serving(self) -> EngineProfile:
        """The engine that serves."""
        return self.engines[self.engine]

    def served_by(self, engine: str | None) -> DeviceProfile:
        """Return the profile with another of the device's engines; None: its own.

        Raises ConfigError, which lists the known engines.
        """
        if engine is None or engine == self.engine:
            return self
        if engine not in self.engines:
            raise ConfigError(f"{self.device}: engine", engine, unknown(engine, list(self.engines)))
        return self.model_copy(update={"engine": engine})

    def costs(self, model: str | ModelSpec, tp: int = 1, sm_percent: int = 100) -> StepCosts:
        """Return the costs of a model, by its name in this file or the catalogue, or by its sizes.

        Measured costs under the engine that serves where there are any, else the roofline's, which
        covers whole devices, and groups of the sizes in `all_reduce`. Raises ConfigError, which
        lists the known names.
        """
        name, like = self._like(model)
        rows = [row for row in self._rows if row.model.lower() in like]
        chosen = [row for row in rows if (row.tp, row.sm_percent) == (tp, sm_percent)]
        if chosen:
            return self._complete(min(chosen, key=lambda row: row.model.lower() != name.lower()))
        groups = {group.tp: group for group in self.all_reduce}
        if sm_percent == 100 and (tp == 1 or tp in groups):
            return self.roofline(model, groups.get(tp))
        have = [f"tp {row.tp}, {row.sm_percent} %" for row in rows] or ["nothing of this model"]
        have += [f"all-reduces among {tp}" for tp in groups]
        raise ConfigError(
            f"{self.device}: {name}",
            f"tp {tp}, {sm_percent} % of multiprocessors",
            f"measured here: {'; '.join(have)}",
        )

    def on_parts(self, model: str | ModelSpec, tp: int = 1) -> list[tuple[float, StepCosts]]:
        """Return the measured costs of a model on parts of the multiprocessors under the engine
        that serves: (share below 1, costs), ascending; empty where there are none."""
        _, like = self._like(model)
        rows = [r for r in self._rows if r.tp == tp and r.model.lower() in like]
        percents = {row.sm_percent for row in rows if row.sm_percent < 100}
        return [(p / 100, self.costs(model, tp, p)) for p in sorted(percents)]

    def of(self, specs: Iterable[ModelSpec]) -> MachineProfile:
        """Return the machine profile of one device of this kind that serves `specs`."""
        engine = self.serving
        peers = ASSUMED if self.peers is None else self.peers.costs
        pages = None if self.pages is None else self.pages.costs
        if pages is not None:
            pages = replace(pages, borrow=peers.borrow, give_back=peers.give_back)
        return MachineProfile(
            costs={spec.name: self.costs(spec) for spec in specs},
            link=self.link.rates,
            overhead=engine.overhead_seconds,
            wake=engine.wake_seconds,
            settling=tuple(engine.settling_seconds),
            switch=engine.switch_seconds,
            switch_back=engine.switch_seconds
            if engine.switch_back_seconds is None
            else engine.switch_back_seconds,
            turn=engine.turn_seconds,
            answer=engine.answer_seconds,
            on_parts=self.on_parts,
            page_seconds=self.page_seconds,
            reach=self.lane_reach,
            ahead=0 if engine.host is None else engine.host.steps_ahead,
            pages=pages,
            peers=peers,
            copies_slow=self.copies_slow,
            spread=JobSpread(quantiles=tuple(engine.spread)),
            early=self.early_jobs,
            in_place=self.in_place,
        )

    @property
    def _rows(self) -> list[MeasuredModel]:
        """Measured models under the engine that serves."""
        sources = {name for name, source in self.sources.items() if source.engine == self.engine}
        return [row for row in self.measured if row.source in sources]

    def _like(self, model: str | ModelSpec) -> tuple[str, set[str]]:
        """Its name, and in lower case those of it and of all models of its shape."""
        known = catalogue()
        if isinstance(model, ModelSpec):
            name, shape = model.name, shape_of(model)
        else:
            name = model
            own = {m.name.lower(): m for m in known.values()}.get(model.lower())
            if own is None:
                names = list(dict.fromkeys([row.model for row in self._rows] + list(known)))
                if model.lower() not in (n.lower() for n in names):
                    raise ConfigError("model", model, unknown(model, names))
                return name, {model.lower()}
            shape = own.shape
        like = {m.name.lower() for m in known.values() if m.shape == shape}
        return name, like | {name.lower()}

    def _complete(self, row: MeasuredModel) -> StepCosts:
        """Its costs; a prefill that was not measured is the roofline's."""
        values = row.costs.model_dump()
        if row.costs.per_token is None or row.costs.per_pair is None:
            other = self.roofline(row.model)
            values |= {"per_token": other.per_token, "per_pair": other.per_pair}
            values |= {"floor": other.floor, "hidden": min(other.hidden, row.costs.base)}
        return StepCosts(**values)

    def on(self, hardware: Hardware) -> DeviceProfile:
        """Return the profile with other peaks: those of a part of the device."""
        return self.model_copy(update={"hardware": hardware})

    @property
    def in_place(self) -> InPlaceMachine | None:
        """How passes read weights in host memory; None: host memory is the device's memory."""
        if self.hardware is None:
            return None
        reach, derate = self.reach, self.serving.derate
        reading = derate.weights if derate else reach.reading if reach else 1.0
        return InPlaceMachine(
            memory_bandwidth=self.hardware.memory_bandwidth / reading,
            multiprocessors=self.hardware.multiprocessors,
            without_reading=lambda spec: self.roofline(spec, reads=False),
        )

    def roofline(
        self, model: str | ModelSpec, group: AllReduce | None = None, reads: bool = True
    ) -> StepCosts:
        """Return what a model's costs would be by peaks and derate alone; `reads`: whether passes
        read weights in device memory.

        Raises ConfigError where the profile has neither.
        """
        engine, hardware, reach = self.serving, self.hardware, self.reach
        apart = engine.host is not None and reach is not None
        if hardware is None or not (apart or engine.derate):
            name = model if isinstance(model, str) else model.name
            raise ConfigError(
                f"{self.device}: model", name, unknown(name, [row.model for row in self._rows])
            )
        sizes = (
            Sizes.of_spec(model) if isinstance(model, ModelSpec) else Sizes.of_facts(facts(model))
        )
        if not reads:
            sizes = sizes.without_reading()
        if engine.derate is not None:
            return roofline(sizes, hardware, engine.derate, group)
        assert reach is not None
        assert engine.host is not None
        return step_costs(sizes, hardware, reach, engine.host, group)


def profile_of(
    device: str,
    measured: MachineProfile,
    settings: DeviceSettings,
    over_http: MachineProfile | None = None,
) -> DeviceProfile:
    """Build a profile from the measurements of `sim.calibrate` on a device with `settings`. It has
    no peaks, and so no costs of other models. `over_http`: further measurements, of the engine as
    a server's clients see it."""
    engines, sources, rows = {}, {}, []
    for name, source, found in ((OWN, "calibrate", measured), (OVER_HTTP, "http", over_http)):
        if found is None:
            continue
        engines[name] = _engine_of(found, "over HTTP" if name == OVER_HTTP else "in one process")
        sources[source] = MeasurementSource(
            artifact="ballast profile, on the machine itself",
            licence="the measurer's own",
            engine=name,
        )
        rows += [
            MeasuredModel(model=model, source=source, costs=CostCoefficients(**asdict(costs)))
            for model, costs in found.costs.items()
        ]
    calls = measured.pages
    pages = None
    if calls is not None:
        pages = PageCallCosts(
            map_seconds=calls.map,
            unmap_seconds=calls.unmap,
            beside_seconds=calls.beside,
            kv=calls.kv,
            source="calibrate",
        )
    return DeviceProfile(
        device=device,
        engine=OWN,
        engines=engines,
        link=LinkProfile(**asdict(measured.link), source="calibrate"),
        page_seconds=measured.page_seconds,
        pages=pages,
        peers=None if measured.peers is ASSUMED else PeerProfile.of(measured.peers),
        lane_reach=measured.reach,
        copies_slow=measured.copies_slow,
        early_jobs=measured.early,
        served=MeasuredDevice(
            **{key: getattr(settings, key) for key in MeasuredDevice.model_fields}
        ),
        sources=sources,
        measured=rows,
    )


def _engine_of(measured: MachineProfile, way: str) -> EngineProfile:
    """Return this project's engine as measured; `way`: how its clients reach it."""
    return EngineProfile(
        served_by=f"ballast {__version__}, {way}, on one lane",
        overhead_seconds=measured.overhead,
        wake_seconds=measured.wake,
        settling_seconds=list(measured.settling),
        switch_seconds=measured.switch,
        switch_back_seconds=measured.switch_back,
        turn_seconds=measured.turn,
        answer_seconds=measured.answer,
        spread=list(measured.spread.quantiles),
    )


def device_profile(name: str | Path, engine: str | None = None) -> DeviceProfile:
    """Read the profile of a device by name, or a file (anything that ends in .toml), under its own
    engine or the one that is named, as in `H100-80G@eager`; else under `engine`, if not None.

    Raises ConfigError: an unknown name, with those that are known; a faulty file, with the key.
    """
    device, at, named = str(name).rpartition("@")
    if not at or "/" in named or named.endswith(".toml"):
        device, named = str(name), ""
    if device.endswith(".toml"):
        return read_keys(Path(device), DeviceProfile).served_by(named or engine)
    known = device_files()
    file = {n.lower(): f for n, f in known.items()}.get(device.lower())
    if file is None:
        raise ConfigError("device", device, unknown(device, list(known)))
    return _shipped(file.name).served_by(named or engine)


@functools.cache
def device_files() -> dict[str, Traversable]:
    """Device and file of every profile that comes with Ballast, in order of names."""
    chosen = [f for f in _FOLDER.iterdir() if f.name.endswith(".toml") and f.name != CATALOGUE]
    return {f.name.removesuffix(".toml"): f for f in sorted(chosen, key=lambda f: f.name)}


@functools.cache
def _shipped(name: str) -> DeviceProfile:
    return read_keys(_FOLDER / name, DeviceProfile)
