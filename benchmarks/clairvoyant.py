"""Orders of compute that know the future: what an order that does not know it is measured against.

They know when each request will arrive and how long its answer will be, or that alone, and neglect
requests that are late. The best of several, the order that knows nothing among them, is chosen for
each run once all are over. That proves no bound on what any order could serve; it shows what more
knowledge would bring.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ballast.core.compute import ComputeDecision, ComputeView, WorkView
from ballast.core.cost import StepCosts
from ballast.core.request import Precedence
from ballast.core.settings import Slo
from ballast.policy.compute.deadline import Deadline
from ballast.policy.compute.demand import Task
from ballast.workload.workload import Workload, WorkloadRequest

MARGINS = (0.0, 0.5, 1.0, 2.0)
HORIZON = 2.0
"""Seconds ahead that an order looks for arrivals."""


@dataclass(frozen=True)
class Future:
    """What will happen in a run."""

    workload: Workload
    levels: Mapping[str, Slo]
    costs: Mapping[str, StepCosts]
    """Of a lane, the engine's own time included."""
    outputs: Mapping[tuple[str, float], int] = field(init=False)
    """Tokens of each answer, by model and arrival."""
    arrivals: Sequence[float] = field(init=False)

    def __post_init__(self) -> None:
        requests = self.workload.requests
        known = {(r.model, r.at): r.output_tokens for r in requests}
        object.__setattr__(self, "outputs", known)
        object.__setattr__(self, "arrivals", [r.at for r in requests])

    def coming(self, now: float) -> list[Task]:
        """The prefills of the next HORIZON seconds."""
        first, last = (bisect_right(self.arrivals, t) for t in (now, now + HORIZON))
        return [self._prefill(r, now) for r in self.workload.requests[first:last]]

    def revealed(self, work: WorkView) -> WorkView:
        """With the tokens that each answer really has left."""
        return replace(
            work,
            decodes=tuple(
                d._replace(outputs=max(1, self._outputs(work.model, d.order) - d.generated))
                for d in work.decodes
            ),
            prompts=tuple(
                p._replace(outputs=self._outputs(work.model, p.order)) for p in work.prompts
            ),
        )

    def _outputs(self, model: str, order: Precedence) -> int:
        return self.outputs[model, order.arrival]

    def _prefill(self, r: WorkloadRequest, now: float) -> Task:
        due = r.at + self.levels[r.model].ttft - now
        return Task(due, self.costs[r.model].prefill_seconds(r.prompt_tokens))


@dataclass(frozen=True, slots=True)
class Clairvoyant(Deadline):
    """The order by deadline, told of the future."""

    future: Future | None = None
    arrivals: bool = True
    """Whether it knows of requests before they arrive."""

    def coming(self, now: float) -> Sequence[Task]:
        return self.future.coming(now) if self.future is not None and self.arrivals else ()

    def __call__(self, view: ComputeView, memo: object) -> ComputeDecision:
        assert self.future is not None
        future, work_of = self.future, view.work_of
        result = replace(view, work_of=lambda name: future.revealed(work_of(name)))
        return Deadline.__call__(self, result, memo)


def orders(future: Future) -> list[Deadline]:
    """Those of which the best counts."""
    known = [Clairvoyant(late_share=1e-6, margin=m, future=future) for m in MARGINS]
    lengths = Clairvoyant(future=future, arrivals=False)
    return [Deadline(), lengths, *known]
