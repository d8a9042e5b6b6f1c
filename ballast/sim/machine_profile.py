"""Costs of a machine, from which a simulated device knows how long everything takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ballast.core.cost import StepCosts
from ballast.core.link import LinkRates
from ballast.core.model import ModelSpec
from ballast.sim.in_place import InPlaceMachine
from ballast.sim.job_spread import NONE, JobSpread
from ballast.sim.page_costs import PageCosts
from ballast.sim.peer_costs import ASSUMED, PeerCosts

PAUSE = 5e-3
"""Seconds without work beyond which a job comes after a pause; from 20 ms on pauses are alike."""
RECENT = 8e-3
"""Seconds from the end of a model's last job within which caches still hold some of its weights."""
OnParts = Callable[[ModelSpec], Sequence[tuple[float, StepCosts]]]
"""Returns measured job costs of a model on parts of a device: (share of its compute, above 0 and
below 1, costs there), ascending by share; empty where nothing was measured."""


def unmeasured(spec: ModelSpec) -> Sequence[tuple[float, StepCosts]]:
    """An `OnParts` where nothing was measured."""
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile:
    """Costs of a machine that a simulation needs, in seconds."""

    costs: Mapping[str, StepCosts]
    """By model name."""
    link: LinkRates
    overhead: float
    """Seconds of the engine's own work per job."""
    wake: float = 0.0
    """Seconds that a job takes longer after a pause of more than `PAUSE`."""
    settling: tuple[float, ...] = ()
    """Seconds that the first, second, ... decode step after a prefill takes longer."""
    switch: float = 0.0
    """Seconds that a job takes longer after another model's, without a pause between them."""
    switch_back: float = 0.0
    """The same of a job whose model ran within `RECENT`, as where models take turns."""
    turn: float = 0.0
    """Seconds that a job takes longer for each turn of the loop with events while it runs."""
    answer: float = 0.0
    """Seconds from a request's receipt to the loop's turn, and from a turn to the client."""
    reach: float = 1.0
    """Most memory bandwidth that a job on part of the compute can use, in multiples of that part
    (`sim.lanes`)."""
    on_parts: OnParts = field(default=unmeasured, compare=False)
    """Measured job costs on parts of the device; where there are none they are estimated."""
    page_seconds: float = 0.0
    """Seconds per page of an activation beyond its copy, where `pages` is None."""
    ahead: int = 0
    """Steps that the engine has scheduled when a request arrives (`sim.steps_ahead`)."""
    pages: PageCosts | None = None
    """Costs of mapping in the loop's time; None: only activations are slower (`page_seconds`)."""
    copies_slow: float = 0.0
    """Fraction by which a job is slower if it begins while bytes move over the device's link."""
    spread: JobSpread = NONE
    early: bool = False
    """Whether a model's first job begins while its last layers arrive (`engine.head_start`)."""
    peers: PeerCosts = ASSUMED
    """Costs between this device and others of its server."""
    in_place: InPlaceMachine | None = field(default=None, compare=False)
    """How passes read weights in host memory; None: host memory is the device's memory."""

    def reading_in_place(self, specs: Iterable[ModelSpec]) -> dict[str, StepCosts]:
        """Return `lane_costs` of models whose weights are all in host memory."""
        if self.in_place is None:
            return self.lane_costs
        link = self.link.to_device
        return {s.name: self.in_place.costs(s, link).after(self.overhead) for s in specs}

    @property
    def lane_costs(self) -> dict[str, StepCosts]:
        """Job costs on a lane, by model name, the engine's own time included."""
        return {name: c.after(self.overhead) for name, c in self.costs.items()}

    def over(self, link: LinkRates) -> MachineProfile:
        """Return the profile of the same machine behind another link. Jobs are slower beside copies
        in proportion to the bytes that move."""
        share = min(1.0, link.to_device / self.link.to_device)
        return replace(self, link=link, copies_slow=share * self.copies_slow)

    def moving(self, page_bytes: int) -> LinkRates:
        """Return the rates at which weights move over the link: pages of this size mapped, then
        copied. The loop's own calls (`pages`) come before and are not included."""
        seconds = self.page_seconds if self.pages is None else self.pages.beside
        mapping = seconds / page_bytes
        slower = (
            1 / (1 / rate + mapping) for rate in (self.link.to_device, self.link.to_device_mixed)
        )
        to_device, mixed = slower
        return replace(self.link, to_device=to_device, to_device_mixed=mixed)
