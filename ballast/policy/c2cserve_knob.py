"""Tune a GEMM's share of output-stationary columns by feedback (C2CServe, 6.4, 7.3).

The share starts at 0, which spares the link. Where the link is used more than device memory it is
lowered, where device memory is used more it is raised; both are smoothed first. The update is made
at the boundaries of layers and changes nothing else. On CPUs, where host memory is the device's
memory, the share means nothing. Used by the simulator, and by GPUs (`live/cuda_reads.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class KnobRule:
    """Constants of the feedback; the paper states none of them."""

    smoothing: float = 0.5
    """Weight of a new measurement in the moving averages."""
    dead_band: float = 0.05
    """Imbalance up to which the share stays."""
    step: float = 0.02
    """Change while the latency budget is met."""
    late_step: float = 0.08
    """Change while it is exceeded; the largest of one interval."""


@dataclass(frozen=True, slots=True)
class PassMeasurement:
    """What a layer of a pass showed, in times of the whole pass."""

    seconds: float
    budget: float
    """Seconds that the pass may take by its service level."""
    link: float
    """Part of `seconds` in which the pass used the link, from 0 to 1."""
    device: float
    """The same of device memory."""


@dataclass(frozen=True, slots=True)
class Knob:
    """The share of one model on one device, with its smoothed measurements."""

    os_share: float = 0.0
    imbalance: float = 0.0
    """Use of the link less that of device memory."""
    lateness: float = 0.0
    """Seconds over budget."""
    passes: int = 0

    def after(self, seen: PassMeasurement, rule: KnobRule) -> Knob:
        """Return the knob after a pass."""
        weight = 1.0 if not self.passes else rule.smoothing
        imbalance = self.imbalance + weight * (seen.link - seen.device - self.imbalance)
        lateness = self.lateness + weight * (seen.seconds / seen.budget - self.lateness)
        step = rule.late_step if lateness > 1.0 else rule.step
        share = self.os_share
        if imbalance > rule.dead_band:
            share -= step
        elif imbalance < -rule.dead_band:
            share += step
        return replace(
            self,
            os_share=min(1.0, max(0.0, share)),
            imbalance=imbalance,
            lateness=lateness,
            passes=self.passes + 1,
        )


class KnobSetting(NamedTuple):
    """How `os_share` is chosen, and what passes reserve of the link."""

    rule: KnobRule | None = KnobRule()
    """None: it stays."""
    start: float = 0.0
    reserves: bool = True
    """Whether passes have W / TPOT of a link that others use too."""

    @classmethod
    def of(cls, options: Mapping[str, float]) -> KnobSetting:
        """Return the setting of a preset with these options: `knob`, `os_share`, `reserve_link`."""
        rule = KnobRule() if options.get("knob", 1) else None
        return cls(rule, options.get("os_share", 0.0), bool(options.get("reserve_link", 1)))
