"""What a compute policy sees, and what it answers: which model's job runs next on an idle lane."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ballast.core.cost import StepCosts
from ballast.core.request import Precedence


class DecodeView(NamedTuple):
    """A running request that decodes: one more token with each step of its model."""

    order: Precedence
    due: float
    """When its first token was, or is, due, in seconds on the device's clock."""
    first: float | None
    """When that came; None: it has not."""
    last: float
    """When its last token came; before the first: when it arrived."""
    generated: int
    """Tokens of its output so far."""
    outputs: int
    """Tokens that it is expected to generate from now on, at least 1."""
    pace: float
    """Seconds per output token after the first, on average, that its service level allows."""
    context: int
    """Tokens whose KV its next step reads."""


class PromptView(NamedTuple):
    """A request of whose prompt (after a preemption: and output so far) some is not computed."""

    order: Precedence
    tokens: int
    """Left to compute."""
    start: int
    """Computed, or cached, before these."""
    due: float
    """When its next token is due, the first or, after a preemption, another: -inf where it cannot
    keep its service level any more."""
    last: float
    """As of `DecodeView`, like what follows."""
    outputs: int
    pace: float


@dataclass(frozen=True, slots=True)
class WorkView:
    """What one model could run now."""

    model: str
    costs: StepCosts
    """As its jobs take, the engine's own time included."""
    decodes: tuple[DecodeView, ...]
    prompts: tuple[PromptView, ...]
    """In the order in which they are computed: admitted ones, then those that wait, up to a bound;
    none of those that wait where the first of them finds no memory."""


@dataclass(frozen=True, slots=True)
class Runnable:
    """A model that could run a job now."""

    model: str
    last_run: float
    """When its last job ended; -inf: it has never run."""
    first_prompt: Precedence | None
    """Order of the first request whose prompt is not computed, if any."""
    moves_kv: bool = False
    """Its next job moves KV between device and host, and nothing else."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """A job that runs on another lane."""

    model: str
    prefills: bool
    """Whether prompts are in it."""
    parts: int
    """Of the device's compute (`DeviceSettings.parts`)."""


@dataclass(frozen=True, slots=True)
class ComputeView:
    """One device when a lane is idle."""

    now: float
    step_tokens: int
    """Most tokens of a job."""
    runnable: tuple[Runnable, ...]
    """At least one; in the fleet's order."""
    work_of: Callable[[str], WorkView]
    """What a runnable model could run: made when asked for, the same for the same moment."""
    lanes: int = 1
    parts: int = 1
    """Of the device's compute (`DeviceSettings.parts`)."""
    in_flight: tuple[InFlight, ...] = ()
    """Jobs on the other lanes; their models are not runnable."""

    @property
    def free_parts(self) -> int:
        """Parts that no job in flight has."""
        return self.parts - sum(job.parts for job in self.in_flight)


class Phase(enum.Enum):
    """What a job of a model computes."""

    MIXED = "mixed"
    """A decode step of all that decode, and chunks of prompts beside it."""
    PREFILL = "prefill"
    """Prompts alone, as long as there are any that find memory; else a decode step."""
    DECODE = "decode"
    """A decode step alone."""


@dataclass(frozen=True, slots=True)
class ComputeDecision:
    """Which model runs a job, and what is in it."""

    model: str
    prompt_tokens: int | None = None
    """Most tokens of prompts in it, beside the decodes; None: as many as a job may have."""
    until: float = float("-inf")
    """It decodes on until then, and is not asked again, unless something else happens: a request
    arrives or ends, weights come or go, pages are short."""
    memo: object = None
    """What the policy remembers."""
    phase: Phase = Phase.MIXED
    parts: int | None = None
    """Most parts of the device's compute (`DeviceSettings.parts`) that the job takes, where there
    are several lanes; None: as many as are free, divided among the models that could run."""

    @property
    def computes_prompts(self) -> bool:
        """Whether prompts may be in the job."""
        return self.prompt_tokens != 0 and self.phase is not Phase.DECODE
