"""Define the view and the decision of a compute policy: which model's job runs next on a lane.

Built by the engine's dispatcher when a lane is idle; policies (`policy.compute`) only read it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ballast.core.cost import StepCosts, Traffic
from ballast.core.request import Precedence


class DecodeView(NamedTuple):
    """A running request that decodes: one more token with each step of its model."""

    order: Precedence
    due: float
    """Deadline of its first token by its service level, in seconds on the device's clock."""
    first: float | None
    """Time of its first token; None: there is none yet."""
    last: float
    """Time of its last token; before the first: its arrival."""
    generated: int
    """Tokens of its output so far."""
    outputs: int
    """Tokens that it is expected to generate from now on, at least 1."""
    pace: float
    """Seconds per output token after the first, on average, that its service level allows."""
    context: int
    """Tokens whose KV its next step reads."""


class PromptView(NamedTuple):
    """A request that needs prefill: part of its prompt (after a preemption also of its output) is
    not computed."""

    order: Precedence
    tokens: int
    """Tokens left to compute."""
    start: int
    """Tokens before these, computed or cached."""
    due: float
    """Deadline of its next token (the first, or after a preemption a later one); -inf if it can no
    longer keep its service level."""
    last: float
    """This field and the following ones are as in `DecodeView`."""
    outputs: int
    pace: float


@dataclass(frozen=True, slots=True)
class WorkView:
    """The decodes and prompts that one model could run now."""

    model: str
    costs: StepCosts
    """Costs of its jobs, the engine's own time included."""
    decodes: tuple[DecodeView, ...]
    prompts: tuple[PromptView, ...]
    """Prompts in the order in which they are computed: admitted ones, then waiting ones up to a
    bound; no waiting ones if the first of them finds no memory."""
    traffic: Traffic = field(default_factory=Traffic)
    """The model's recent request rate, and mean lengths of requests that have ended."""
    late: float = 0.0
    """Seconds by which its jobs may take longer than `costs` say, as some of the recent ones did;
    0 where costs are given."""


@dataclass(frozen=True, slots=True)
class Runnable:
    """A model that could run a job now."""

    model: str
    last_run: float
    """Time at which its last job ended; -inf: it has never run."""
    first_prompt: Precedence | None
    """Precedence of the first request whose prompt is not computed; None: there is none."""
    moves_kv: bool = False
    """Whether its next job only moves KV between device and host."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """A job that runs on another lane."""

    model: str
    prefills: bool
    """Whether prompts are in it."""
    parts: int
    """Parts of the device's compute that it uses (`DeviceSettings.parts`)."""


@dataclass(frozen=True, slots=True)
class ComputeView:
    """One device when a lane is idle: the models that could run a job on it."""

    now: float
    step_tokens: int
    """Bound of the tokens in a job."""
    runnable: tuple[Runnable, ...]
    """Models that could run a job, at least one, in the fleet's order."""
    work_of: Callable[[str], WorkView]
    """Returns the work of a runnable model by its name; computed on the first call."""
    lanes: int = 1
    parts: int = 1
    """Parts of the device's compute (`DeviceSettings.parts`)."""
    in_flight: tuple[InFlight, ...] = ()
    """Jobs on the other lanes; their models are not runnable."""

    @property
    def free_parts(self) -> int:
        """Parts of the device's compute that no job in flight uses."""
        return self.parts - sum(job.parts for job in self.in_flight)


class Phase(enum.Enum):
    """Kind of work in a job: prefill, decode, or both."""

    MIXED = "mixed"
    """A decode step of all decoding requests, together with prefill chunks."""
    PREFILL = "prefill"
    """Prefill alone if some prompt finds memory; else a decode step."""
    DECODE = "decode"
    """A decode step alone."""


@dataclass(frozen=True, slots=True)
class ComputeDecision:
    """A compute policy's result: the model that runs the next job, and the work in the job."""

    model: str
    prompt_tokens: int | None = None
    """Bound of prefill tokens in the job, beside the decodes; None: `step_tokens` alone bounds."""
    until: float = float("-inf")
    """Time until which the model keeps decoding without another call of the policy, unless a
    request arrives or ends, weights come or go, or pages are short."""
    memo: object = None
    """The policy's memo, given to its next call."""
    phase: Phase = Phase.MIXED
    parts: int | None = None
    """Bound of the parts of the device's compute (`DeviceSettings.parts`) that the job uses, with
    several lanes; None: the free parts, divided among the runnable models."""

    @property
    def computes_prompts(self) -> bool:
        """Whether prompts may be in the job."""
        return self.prompt_tokens != 0 and self.phase is not Phase.DECODE
