"""Track the models of a fleet that are not served yet, and choose which one is loaded next.

The server answers before its models are loaded: a request for one of these waits here, and moves
it to the front. `fleet_loader` loads the models; routes, `Service` and the admin service wait.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from ballast.core.clock import Clock
from ballast.core.settings import FleetSettings, ModelSettings
from ballast.core.units import MiB, format_bytes

FIXED_BYTES = 64 * MiB
"""Bytes of weights whose loading takes about as long as what every model takes beside its weights:
reading its configuration, trying its tokenizer, measuring its jobs."""


class LoadStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model that is not served yet, at one moment."""

    model: str
    state: str
    """`queued` or `loading`."""
    bytes: int
    """Bytes of its weights, by the headers of its files."""
    seconds: float = 0.0
    """Time since its loading began."""
    left: float | None = None
    """Estimated seconds until it serves; None: too little has been loaded to judge by."""


@dataclass(slots=True, eq=False)
class PendingLoad:
    """One model that is waited for."""

    settings: ModelSettings
    n_bytes: int
    place: int
    """Place in the fleet."""
    homes: set[str] = field(default_factory=set)
    """Devices that are to load it and have not begun."""
    loading: set[str] = field(default_factory=set)
    """Devices that load it."""
    asked: int | None = None
    """Number of the first request for it; None: nobody has asked."""
    began: float | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def cost(self) -> int:
        """Work of loading it, in bytes of weights."""
        return self.n_bytes + FIXED_BYTES

    @property
    def order(self) -> tuple[bool, int, bool, int]:
        """Sort key: models that requests wait for, as these came; those of `preload` and pinned
        ones; the others in the fleet's order."""
        early = self.settings.preload or self.settings.pinned
        return (self.asked is None, self.asked or 0, not early, self.place)


class ModelLoads:
    """The models that are loaded or are about to be. Used on the server's event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._loads: dict[str, PendingLoad] = {}
        self._names: dict[str, str] = {}
        """Own name of each model, by all names of it and of its adapters."""
        self._requests = itertools.count()
        self._total = 0
        self._paces: list[float] = []
        """Seconds for each byte of cost, of the models that have been loaded."""
        self._all_ended = asyncio.Event()
        self._all_ended.set()

    def queue(self, fleet: FleetSettings, sizes: Mapping[str, int]) -> None:
        """Expect all models of a fleet; `sizes`: bytes of their weights."""
        for place, model in enumerate(fleet.models):
            load = PendingLoad(model, sizes.get(model.name, 0), place)
            self._loads[model.name] = load
            self._names |= dict.fromkeys(model.names, model.name)
            self._total += load.cost
        if self._loads:
            self._all_ended.clear()

    def assign(self, homes: Mapping[str, Sequence[str]]) -> None:
        """Note the devices that are to load each model."""
        for name, at in homes.items():
            self._loads[name].homes |= set(at)

    def __len__(self) -> int:
        return len(self._loads)

    def __iter__(self) -> Iterator[PendingLoad]:
        """Iterate over the models in the order in which they are to be loaded."""
        return iter(sorted(self._loads.values(), key=lambda load: load.order))

    def find(self, name: str) -> PendingLoad | None:
        """Return the load of a model by any name of it or of its adapters; None: it has ended, or
        there is no such model."""
        return self._loads.get(self._names.get(name, ""))

    # -- loading ----------------------------------------------------------------------------------

    def next(self, device: str) -> PendingLoad | None:
        """Return the model that a device is to load next; None: it has loaded all of them."""
        return next((load for load in self if device in load.homes), None)

    def begin(self, load: PendingLoad, device: str) -> None:
        """Note that a device loads a model now."""
        load.homes.discard(device)
        load.loading.add(device)
        if load.began is None:
            load.began = self._clock.now()

    def end(self, names: Iterable[str]) -> None:
        """Note that models serve now, or cannot."""
        for name in names:
            load = self._loads.pop(name, None)
            if load is not None:
                if load.began is not None:
                    self._paces.append((self._clock.now() - load.began) / load.cost)
                load.ended.set()
        if not self._loads:
            self._all_ended.set()

    # -- waiting ----------------------------------------------------------------------------------

    def want(self, load: PendingLoad) -> None:
        """Have a model loaded before those that nobody has asked for."""
        if load.asked is None:
            load.asked = next(self._requests)

    async def wait(self, load: PendingLoad, seconds: float | None = None) -> bool:
        """Wait until a model serves or has failed, at most for so many seconds; returns whether it
        does or has. Meanwhile it is loaded before those that nobody waits for."""
        self.want(load)
        try:
            async with asyncio.timeout(seconds):
                await load.ended.wait()
        except TimeoutError:
            return False
        return True

    def give_up(self) -> None:
        """Have nobody wait any longer, since the server stops."""
        for load in self._loads.values():
            load.ended.set()
        self._all_ended.set()

    async def wait_for_all(self) -> None:
        """Wait until each model serves or has failed."""
        await self._all_ended.wait()

    # -- progress ---------------------------------------------------------------------------------

    def now(self, load: PendingLoad) -> LoadStatus:
        """Describe a load."""
        began = load.began
        return LoadStatus(
            load.name,
            "queued" if began is None else "loading",
            load.n_bytes,
            0.0 if began is None else round(self._clock.now() - began, 1),
            self._left(load),
        )

    def described(self, load: PendingLoad) -> str:
        """Describe a load in a few words: ``loading atlas (33.0MiB), 2 s left``."""
        now = self.now(load)
        left = "" if now.left is None else f", {now.left:.0f} s left"
        return f"{now.state} {now.model} ({format_bytes(now.bytes)}){left}"

    def progress(self) -> str:
        """Describe all loads: ``3 of 8 models, 120.0MiB of 300.0MiB, now a, 4 s left``."""
        loads = list(self)
        now = ", ".join(load.name for load in loads if load.began is not None)
        n_left = sum(load.n_bytes for load in loads)
        models = len(set(self._names.values()))
        n_bytes = self._total - FIXED_BYTES * models
        left = self._left(loads[-1]) if loads else 0.0
        return (
            f"{models - len(loads)} of {models} models, "
            f"{format_bytes(n_bytes - n_left)} of {format_bytes(n_bytes)}"
            + (f", now {now}" if now else "")
            + ("" if left is None else f", {left:.0f} s left")
        )

    def _left(self, load: PendingLoad) -> float | None:
        """Estimate the seconds until a model serves, by the time that the others took."""
        later = self._paces[1:]  # the first one has waited for kernels to be compiled
        if not later:
            return None
        now, pace = self._clock.now(), sum(later) / len(later)
        ahead = [x for x in self if x.order <= load.order or x.began is not None]
        spent = sum(now - x.began for x in ahead if x.began is not None)
        return round(max(0.0, pace * sum(x.cost for x in ahead) - spent), 1)
