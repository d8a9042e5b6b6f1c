"""Order jobs by deadline, with the smallest prompt chunks that keep them (C2CServe, 6.3).

The compute policy of preset `c2cserve`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from ballast.core.compute import ComputeDecision, ComputeView, PromptView, WorkView
from ballast.core.cost import StepCosts
from ballast.core.job import JobLoad, chunk_pairs
from ballast.core.units import ceil_div
from ballast.policy.compute.deadline import Deadline

LEAST = 128
"""Tokens of the smallest chunk: one tile of a GPU's matrix products."""
LOOKED_AT = 8
"""Most prompts of a model's queue that are to keep their levels."""


@dataclass(frozen=True, slots=True)
class Chunks(Deadline):
    """Order jobs as `deadline` does; compute prompts in the smallest chunk that keeps their levels.

    The table of chunk sizes, by model and device, is the model's job costs there, learned or from a
    profile, at each size from `LEAST` tokens on, doubled. Device memory's bandwidth is in these. A
    chunk is fit if the first prompts of the queue get their first tokens in time; if no stream
    beside it waits for longer than its TPOT level; and if passes read weights no more often than
    the model's part of the link allows, once per TPOT (6.2). Where none is, the one is taken that
    computes the prompts soonest.

    `whole`: prompts are computed as they come, as `deadline` does (for comparison).
    """

    whole: float = 0

    def __call__(self, view: ComputeView, memo: object) -> ComputeDecision:
        decision = Deadline.__call__(self, view, memo)
        work = view.work_of(decision.model)
        if self.whole or not decision.computes_prompts or not work.prompts:
            return decision
        most = decision.prompt_tokens or view.step_tokens
        chunk = smallest_chunk(work, view.now, view.step_tokens)
        return decision if chunk >= most else replace(decision, prompt_tokens=chunk)


def smallest_chunk(work: WorkView, now: float, most: int) -> int:
    """Return the smallest fit chunk of up to `most` tokens, or the one that is soonest done."""
    pace = min((d.pace for d in work.decodes), default=float("inf"))
    queue = work.prompts[:LOOKED_AT]
    soonest = most, float("inf")
    for chunk in _sizes(most):
        seconds = [_prefill_seconds(work, p, chunk) for p in queue]
        ends = [now + end for end in accumulate(seconds)]
        passes = accumulate(ceil_div(p.tokens, chunk) for p in queue)
        within = all(
            n <= max(1.0, (p.due - now) / p.pace) for n, p in zip(passes, queue, strict=True)
        )
        step = work.costs.of(_load(work, chunk, 0)) if work.decodes else 0.0
        in_time = all(end <= p.due for end, p in zip(ends, queue, strict=True))
        if within and in_time and step <= pace:
            return chunk
        if ends[-1] < soonest[1]:
            soonest = chunk, ends[-1]
    return soonest[0]


def _sizes(most: int) -> list[int]:
    sizes = [LEAST]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return [min(size, most) for size in sizes]


def _prefill_seconds(work: WorkView, prompt: PromptView, chunk: int) -> float:
    """Return the seconds to compute a prompt in chunks, the model's decodes in each."""
    costs: StepCosts = work.costs
    whole, rest = divmod(prompt.tokens, chunk)
    middle = prompt.start + max(0, prompt.tokens - chunk) // 2
    seconds = whole * costs.of(_load(work, chunk, middle))
    return seconds + (costs.of(_load(work, rest, prompt.start)) if rest else 0.0)


def _load(work: WorkView, tokens: int, start: int) -> JobLoad:
    context = sum(d.context for d in work.decodes)
    return JobLoad(tokens, 1, chunk_pairs(tokens, start), len(work.decodes), context)
