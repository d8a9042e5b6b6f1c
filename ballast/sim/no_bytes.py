"""Stand in for memory that holds bytes: simulated devices and replays have none."""

from __future__ import annotations

from ballast.core.model import ModelSpec
from ballast.core.settings import DeviceSettings
from ballast.engine.build import Hosted
from ballast.memory.vm_null import NullVm
from ballast.sim.page_costs import LoopTime, PageCosts, TimedVm


def hosted_nowhere(spec: ModelSpec) -> Hosted:
    """Return a model whose segments are at no address: there is no host tier."""
    return Hosted(spec, [0] * len(spec.segment_bytes))


def copy_nothing(dst: int, src: int, n_bytes: int) -> None:
    """Do nothing: there are no bytes."""


def vm_of(settings: DeviceSettings, costs: PageCosts | None, calls: LoopTime) -> NullVm:
    """Build a vm without memory; mapping takes the loop's time where its `costs` are known."""
    n_pages = settings.budget_bytes // settings.page_bytes
    if costs is None:
        return NullVm(settings.page_bytes, n_pages)
    return TimedVm(settings.page_bytes, n_pages, costs, calls)
