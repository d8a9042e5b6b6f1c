"""Simulate a cluster: device kinds, placement of models, links and lending under one workload.

Used by `ballast simulate` and `ballast plan` (`bench.simulation`, `bench.planning`). `Cluster`
builds the `SimDevice`s from profiles, places the models and serves the requests.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from ballast.cluster.placing import need_of, placed_by_role
from ballast.core.cost import StepCosts, Traffic
from ballast.core.entries import Sink
from ballast.core.errors import ConfigError
from ballast.core.event import Output
from ballast.core.fleet import DeviceCapacity, ModelDemand
from ballast.core.link import LinkRates
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.core.settings import DeviceSettings, Role
from ballast.core.units import MiB
from ballast.engine.state import DeviceState
from ballast.policy.base import FleetPolicy
from ballast.policy.presets import Preset
from ballast.sim.cluster_files import NO_FILES, ClusterFiles
from ballast.sim.controller import FleetStart, OnMove, ReadyAt, SimController
from ballast.sim.cost_switches import ALL, CostSwitches
from ballast.sim.device import SendTokens, SimDevice
from ballast.sim.lending import leases_of
from ballast.sim.machine_profile import MachineProfile, OnParts, unmeasured
from ballast.sim.migration import migrations_of
from ballast.sim.operator_orders import TimedOrder, lending_pair, orders_of
from ballast.sim.profile import DeviceProfile, device_profile
from ballast.sim.roles import check_roles
from ballast.sim.simulate import simulate_devices
from ballast.sim.slices import MigSlice, equal_slices, named_slices, slice_costs
from ballast.sim.topology import ClusterLinks, HostPlace, PeerLinks, places

USABLE = 0.9
"""Share of a device's memory that is the pool's; an assumption, as of common engines' defaults."""
PARTS_PER_LANE = 8
"""Parts of a GPU's compute per lane: jobs on several lanes divide it more finely than by lanes."""
SERVED = DeviceSettings(budget_bytes=0, page_bytes=2 * MiB, step_tokens=2048, step_logits=256)

OnOutput = Callable[[str, float, Output], None]
"""Called with (device, time, output to a client)."""
OnTurn = Callable[[str, float, DeviceState], None]
"""Called with (device, time, its state) when a turn, and the leap that follows it, have ended."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Devices of one kind: whole ones, groups of them, or slices of them."""

    number: int
    """How many devices, or how many groups."""
    profile: DeviceProfile
    lanes: int = 1
    ranks: int = 1
    """Devices of each tensor-parallel group, which is one scheduling unit."""
    slices: tuple[MigSlice, ...] = ()
    """MIG slices into which each device is divided; empty: it is whole. All share the link."""
    part: MigSlice | None = None
    """The slice that this is; None: a whole device, divided or not."""
    modelled: CostSwitches = ALL
    """Costs of the profile that count."""
    role: Role = Role.BOTH

    def costs(self, spec: ModelSpec) -> StepCosts:
        """Return the job costs on a device of this kind. Raises ConfigError for a model without
        costs."""
        if self.part is not None:
            return slice_costs(self.profile, self.part, spec)
        return self.profile.costs(spec, self.ranks)

    @property
    def _there(self) -> DeviceProfile:
        """The profile with the slice's own peaks, if it is one."""
        whole = self.profile.hardware
        if self.part is None or whole is None:
            return self.profile
        return self.profile.on(self.part.of(whole))

    @property
    def units(self) -> list[Kind]:
        """What of one device serves models: the device, or each of its slices, equal ones as one
        object."""
        kinds = {part: replace(self, part=part) for part in dict.fromkeys(self.slices)}
        return [kinds[part] for part in self.slices] or [self]

    @property
    def largest(self) -> Kind:
        """The one of `units` with the most multiprocessors."""
        return max(self.units, key=lambda unit: unit.part.multiprocessors if unit.part else 0)

    @property
    def link(self) -> LinkRates:
        """Bandwidths of a device's link; of a group, the sum over its devices."""
        return self.profile.link.rates.times(self.ranks)

    def of(self, specs: Iterable[ModelSpec]) -> MachineProfile:
        """Return the machine profile of one device of this kind that serves `specs`."""
        costs = {spec.name: self.costs(spec) for spec in specs}
        on_parts: OnParts = functools.partial(self.profile.on_parts, tp=self.ranks)
        if self.part is not None:  # nobody measured parts of a slice
            on_parts = unmeasured
        in_place = None if self.ranks > 1 else self._there.in_place
        profile = self.profile.of(())
        profile = replace(profile, costs=costs, link=self.link)
        profile = replace(profile, on_parts=on_parts, in_place=in_place)
        return self.modelled.of(profile)


def parse_kinds(
    text: str, lanes: int = 1, engine: str | None = None, modelled: CostSwitches = ALL
) -> list[Kind]:
    """Parse `4xH100-80G,2xA100-80G@eager`: a count, and a device's name or a profile's file, for
    each kind. All kinds get the given `lanes`; `engine` applies to kinds that name none, and costs
    count as `modelled`.

    `2xH100-80G:tp4` are two tensor-parallel groups of four, `2xA100-80G:slices2` two devices cut
    into two equal MIG slices each, `H200:3g+2g+2g` one cut into unequal ones; `1xH100-80G:prefill`
    only computes prompts, `:decode` continues them. Raises ConfigError, which lists known names.
    """
    kinds = []
    for part in text.split(","):
        found = re.fullmatch(
            r"\s*(?:(\d+)\s*x\s*)?(\S+?)"
            r"(?::(?:tp([1-9]\d*)|slices([1-9]\d?)|(\d+g[\w.+]*)))?(?::(prefill|decode))?\s*",
            part,
        )
        if found is None or (found[1] is not None and int(found[1]) < 1):
            raise ConfigError("devices", text, "write NUMBERxDEVICE, as in 4xH100-80G,2xA100-80G")
        number, name, ranks, equal, layout, role = found.groups(default="")
        profile = device_profile(name, engine)
        slices = _slices(profile.device, equal, layout)
        kind = Kind(
            int(number or 1),
            profile,
            lanes,
            int(ranks or 1),
            slices,
            modelled=modelled,
            role=Role(role or Role.BOTH),
        )
        kinds.append(kind)
    return kinds


def _slices(device: str, equal: str, layout: str) -> tuple[MigSlice, ...]:
    if layout:
        return named_slices(device, layout)
    return equal_slices(device, int(equal)) if equal else ()


class Cluster:
    """Simulated devices, and the placement of models on them."""

    def __init__(
        self,
        kinds: Sequence[Kind],
        specs: Sequence[ModelSpec],
        preset: Preset,
        on_output: OnOutput,
        served: DeviceSettings = SERVED,
        traffic: Mapping[str, Traffic] | None = None,
        watch: OnTurn | None = None,
        on_move: OnMove = lambda at, action, refused: None,
        sink_of: Callable[[str], Sink | None] = lambda device: None,
        files: ClusterFiles = NO_FILES,
        busiest: Mapping[str, Traffic] | None = None,
        steps: SendTokens | None = None,
    ) -> None:
        """`served`: settings that devices share (each has its own budget); `traffic`: by model, the
        expected load, for a fleet policy that places by work; `busiest`: the load of each model's
        busiest period, if known. `on_move` is called with orders that have ended; `sink_of`
        returns, by device, the sink of its story; `files`: links, placement and operators' orders;
        `steps`: see `SimDevice`. Raises ConfigError for a model that no device can serve.
        """
        policy = preset.fleet if files.homes is None else files.homes
        prefilling = any(kind.role is Role.PREFILL for kind in kinds)
        exchanging = files.moves or policy.moves or prefilling
        sites = _sites(kinds, served, files.joints, exchanging)
        rooms, needs = _rooms_and_needs(sites, specs, preset, traffic, busiest)
        homes = _homes(policy, rooms, needs, sites, files)
        self.devices: dict[str, SimDevice] = {}
        """By name, devices that serve a model or may come to serve one."""
        for name, site in sites.items():
            own = site.place.host.starts_with(s for s in specs if name in homes[s.name])
            if not (own or policy.decides or files.moves):
                continue
            send = functools.partial(self._on_prefill_output if prefilling else on_output, name)
            self.devices[name] = SimDevice(
                site.settings,
                own,
                preset,
                site.kind.of(own),
                send,
                sink_of(name),
                watch and functools.partial(watch, name),
                world=site.place.host.world,
                route=site.place.route,
                steps=steps,
                kv_store=site.place.host.kv_store,
            )
        placed = {name: (d, sites[name].place) for name, d in self.devices.items()}
        self._on_output = on_output
        orders = _orders(files, sites, homes)
        self.controller = SimController(
            self.devices,
            FleetStart(homes, needs, rooms, policy, orders, _ready(sites), _network(files)),
            specs,
            lambda device, spec: sites[device].kind.costs(spec),
            on_move,
            functools.partial(migrations_of, placed if exchanging else {}, policy),
            leases_of(_lent(files, list(sites)), placed, policy.lends),
        )

    def _on_prefill_output(self, device: str, at: float, output: Output) -> None:
        """Pass an output to clients, and hand requests that have been prefilled to decode
        devices."""
        self._on_output(device, at, output)
        for migrations in self.controller.migrations:
            migrations.on_output(device, output)

    @property
    def jobs(self) -> int:
        """Number of jobs run so far, on all devices."""
        return sum(device.state.jobs for device in self.devices.values())

    def run(self, arrivals: Iterable[Submission]) -> float:
        """Serve `arrivals`, in order, until all are answered; returns that time, in virtual
        seconds."""
        return simulate_devices(self.controller, arrivals)


@dataclass(frozen=True, slots=True)
class _Site:
    """A device that a cluster may have: its kind, and its place among the links of its host."""

    kind: Kind
    place: HostPlace
    settings: DeviceSettings


def _sites(
    kinds: Sequence[Kind], served: DeviceSettings, joints: ClusterLinks, exchanging: bool
) -> dict[str, _Site]:
    """Return all devices by name, in the order of `kinds`, slices of one device at one place.
    `exchanging`: whether requests may move between them."""
    sites: dict[str, _Site] = {}
    units = [(kind.link, kind.ranks) for kind in kinds for _ in range(kind.number)]
    one_world = exchanging and joints.network is not None
    free = iter(places(joints, units, one_world=one_world))
    for kind in kinds:
        for _ in range(kind.number):
            place = next(free)
            for unit in kind.units:
                name = f"{kind.profile.device}:{len(sites)}"
                sites[name] = _Site(unit, place, _settings(unit, served, name))
    return sites


def _rooms_and_needs(
    sites: Mapping[str, _Site],
    specs: Sequence[ModelSpec],
    preset: Preset,
    traffic: Mapping[str, Traffic] | None,
    busiest: Mapping[str, Traffic] | None,
) -> tuple[list[DeviceCapacity], list[ModelDemand]]:
    """Return the inputs of fleet policies: the room of each device, the needs of each model."""
    # Not by name: measured profiles may have the same name and not be equally fast.
    kinds = list({id(site.kind): site.kind for site in sites.values()}.values())
    numbers = {id(kind): str(i) for i, kind in enumerate(kinds)}
    hosts = dict.fromkeys(id(site.place.host) for site in sites.values())
    named = {host: str(i) for i, host in enumerate(hosts)}
    rooms = [
        DeviceCapacity(
            name, site.settings.budget_bytes, numbers[id(site.kind)], named[id(site.place.host)]
        )
        for name, site in sites.items()
    ]
    by_number = {numbers[id(kind)]: kind for kind in kinds}
    settings = dict.fromkeys(
        replace(site.settings, name="", budget_bytes=0, role=Role.BOTH) for site in sites.values()
    )
    needs = [
        need_of(
            spec,
            settings,
            _work(spec, by_number, traffic or {}),
            _work(spec, by_number, busiest or {}),
            in_place=preset.requires.in_place,
        )
        for spec in specs
    ]
    return rooms, needs


def _homes(
    policy: FleetPolicy,
    rooms: Sequence[DeviceCapacity],
    needs: Sequence[ModelDemand],
    sites: Mapping[str, _Site],
    files: ClusterFiles,
) -> dict[str, list[str]]:
    """Return, by model, the names of its devices at the start. Raises ConfigError."""
    roles = {name: site.kind.role for name, site in sites.items()}
    joints = files.joints
    check_roles(roles, joints.peers is not PeerLinks.NONE or joints.network is not None)
    if files.homes is None:
        return placed_by_role(policy, needs, rooms, roles)
    return policy.place(needs, rooms)  # which device does what is up to whoever names them


def _orders(
    files: ClusterFiles, sites: Mapping[str, _Site], models: Collection[str]
) -> list[TimedOrder]:
    """Return the operators' orders of a file. Raises ConfigError."""
    pages = {name: site.settings.page_bytes for name, site in sites.items()}
    return orders_of(files.orders, models, pages)


def _network(files: ClusterFiles) -> float:
    """Bytes per second at which a host receives weights."""
    return inf if files.joints.network is None else files.joints.network


def _ready(sites: Mapping[str, _Site]) -> ReadyAt:
    return lambda at, device, spec: sites[device].place.host.ready_at(at, spec)


def _lent(files: ClusterFiles, names: Sequence[str]) -> list[tuple[str, str]]:
    """Return (lender, borrower) of each order to lend. Raises ConfigError."""
    return [lending_pair(order, names) for order in files.orders if order.lends]


def _settings(kind: Kind, served: DeviceSettings, name: str) -> DeviceSettings:
    """Return the settings of one device: its own where its profile was measured on it, else
    `served`.

    A group is simulated as one device whose pages are larger by its number of ranks: each rank has
    its part of every page.
    """
    profile = kind.profile
    if profile.served is not None:
        if kind.ranks > 1 or kind.part is not None:
            allowed = "whole devices: its profile was measured on one"
            raise ConfigError("devices", profile.device, allowed)
        own = profile.served.model_dump()
        return replace(served, name=name, lanes=kind.lanes, role=kind.role, **own)
    if profile.hardware is None:
        raise ConfigError(
            "devices", profile.device, "its profile has neither `hardware` nor `served`: no memory"
        )
    page = served.page_bytes
    hardware = profile.hardware if kind.part is None else kind.part.of(profile.hardware)
    pages = int(USABLE * hardware.memory_bytes) // page
    page *= kind.ranks
    budget = pages * page
    parts = PARTS_PER_LANE * kind.lanes if kind.lanes > 1 else None
    own_settings = replace(served, name=name, lanes=kind.lanes, threads=parts, role=kind.role)
    return replace(own_settings, page_bytes=page, budget_bytes=budget)


def _work(
    spec: ModelSpec, kinds: Mapping[str, Kind], traffic: Mapping[str, Traffic]
) -> dict[str, float]:
    """Return the work of each model by kind of device; requests of adapters count for their
    base."""
    expected = [(traffic[s.name], s.slo.tpot) for s in spec.served if s.name in traffic]
    if not expected:
        return {}
    costs = {name: kind.costs(spec) for name, kind in kinds.items()}
    most = spec.max_running
    return {name: sum(c.work(t, tpot, most) for t, tpot in expected) for name, c in costs.items()}
