"""Read placement problems from JSON (devices, models, token rates) and solve each by an algorithm.

Used by `ballast place`. A problem contains neither architectures nor request lengths, so estimates
of what its models can serve assume both (`docs/placement.md`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, ValidationError

from ballast.core.cost import StepCosts, Traffic
from ballast.core.errors import ConfigError
from ballast.fleet.faults import first_fault
from ballast.fleet.field_types import Positive
from ballast.fleet.schema import Keys
from ballast.policy.fleet.kv_pressure import KvDemand, greedy, max_pressure, moved
from ballast.policy.fleet.mux_estimate import Tenant
from ballast.policy.fleet.mux_placement import place
from ballast.policy.fleet.optimal_placement import lower_bound, optimal
from ballast.policy.fleet.placement_problem import PlacementDevice
from ballast.sim.profile import DeviceProfile
from ballast.sim.toml_file import NotNegative

GB = 1e9
KV_BYTES_PER_WEIGHT_BYTE = 3e-5
"""Bytes of KV per token, for each byte of weights: LLaMA-13B's, in 16 bits."""
PROMPT_TOKENS, OUTPUT_TOKENS = 161, 338
"""Mean prompt and output tokens of a request: ShareGPT's, as vLLM's authors published them (SOSP
'23, Figure 11)."""

Named = Annotated[str, Field(min_length=1)]


class PlacedDevice(Keys):
    """A device."""

    name: Named
    memory_gb: Positive


class PlacedModel(Keys):
    """A model to place, and its demand."""

    name: Named
    weights_gb: Positive
    token_rate: NotNegative
    """Output tokens per second."""
    tpot_slo: Positive
    """Seconds."""
    device: str | None = None
    """Name of the device on which the model is now."""
    tp: Annotated[int, Field(ge=1)] = 1
    """Devices over which it is spread at least."""


class Problem(Keys):
    """Devices of one cluster, and models to place on them."""

    devices: Annotated[list[PlacedDevice], Field(min_length=1)]
    models: list[PlacedModel]


class _Problems(Keys):
    problems: list[Problem]


def problems_of(text: str, where: str) -> tuple[list[Problem], bool]:
    """Parse one problem or a list of them; also returns whether it was a list.

    Raises ConfigError: the text is no JSON, a key is wrong, or a name is used twice or unknown.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ConfigError(where, str(error), "the file must be JSON") from None
    several = isinstance(document, list)
    try:
        found = _Problems.model_validate({"problems": document if several else [document]}).problems
    except ValidationError as error:
        fault = first_fault(error, _Problems)
        key = fault.key.removeprefix("problems[0]." if not several else "")
        raise ConfigError(f"{where}: {key}", fault.value, fault.allowed) from None
    for problem in found:
        for kind, names in (
            ("devices", [d.name for d in problem.devices]),
            ("models", [m.name for m in problem.models]),
        ):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ConfigError(f"{where}: {kind}", twice[0], "names that differ")
        known = {d.name for d in problem.devices}
        for m in problem.models:
            if m.device is not None and m.device not in known:
                allowed = f"null or one of {', '.join(sorted(known))}"
                raise ConfigError(f"{where}: device of {m.name}", m.device, allowed)
    return found, several


@dataclass(frozen=True, slots=True)
class PlacementInputs:
    """Inputs of an algorithm besides the problem."""

    profile: DeviceProfile
    """Profile of the devices."""
    per_host: int = 8
    """Devices over which one model may be spread."""
    threshold: float = 0.0
    """Threshold of `policy.fleet.kv_pressure.greedy`."""


def muxserve(problem: Problem, terms: PlacementInputs) -> dict[str, Any]:
    """Answer by MuxServe's placement, with costs of a device's data sheet. Raises ConfigError for a
    device without one, and as `policy.fleet.mux_placement.place`."""
    began = time.perf_counter()
    tenants = [_tenant(m, terms.profile) for m in problem.models]
    found = place(tenants, _devices(problem), terms.per_host)
    homes = found.homes
    token_rates = {m.name: m.token_rate for m in problem.models}
    models = {
        name: {
            "tokens_per_second": found.estimates[name].rate * OUTPUT_TOKENS,
            "asked_tokens_per_second": token_rates[name],
            "batch": found.estimates[name].batch,
            "compute_share": found.estimates[name].share,
        }
        for name in token_rates
    }
    return {
        "placement": {name: homes[name] for name in token_rates},
        "seconds": time.perf_counter() - began,
        "algorithm": "muxserve",
        "tokens_per_second": found.throughput * OUTPUT_TOKENS,
        "tokens_per_second_before_local_search": found.greedy * OUTPUT_TOKENS,
        "moved": [m.name for m in problem.models if m.device and homes[m.name] != [m.device]],
        "models": models,
    }


def least_pressure(problem: Problem, terms: PlacementInputs) -> dict[str, Any]:
    """Answer by Prism's Algorithm 1. Raises ConfigError, as `policy.fleet.kv_pressure.greedy`."""
    began = time.perf_counter()
    homes = greedy(_claims(problem), _devices(problem), terms.threshold)
    return _pressed(
        problem, "greedy", homes, lower_bound(_claims(problem), _devices(problem)), began
    )


def optimum(problem: Problem, terms: PlacementInputs) -> dict[str, Any]:
    """Answer by the least KV pressure that is found. Raises ConfigError, as
    `policy.fleet.optimal_placement.optimal`."""
    began = time.perf_counter()
    found = optimal(_claims(problem), _devices(problem))
    return _pressed(problem, "optimal", found.homes, found.lower_bound, began)


def _pressed(
    problem: Problem,
    algorithm: str,
    homes: Mapping[str, tuple[str, ...]],
    bound: float,
    began: float,
) -> dict[str, Any]:
    """KVPRs are of GB."""
    claims, devices = _claims(problem), _devices(problem)
    moving = moved(claims, homes)
    return {
        "placement": {m.name: list(homes[m.name]) for m in problem.models},
        "seconds": time.perf_counter() - began,
        "algorithm": algorithm,
        "max_kvpr": GB * max_pressure(claims, devices, homes),
        "lower_bound": GB * bound,
        "moves": [
            {"model": c.name, "from": list(c.devices), "to": list(homes[c.name])}
            for c in claims
            if c.name in moving
        ],
    }


ALGORITHMS: dict[str, Callable[[Problem, PlacementInputs], dict[str, Any]]] = {
    "muxserve": muxserve,
    "greedy": least_pressure,
    "optimal": optimum,
}


def answers(
    problems: Sequence[Problem], algorithm: str, terms: PlacementInputs
) -> list[dict[str, Any]]:
    """Answer all problems. Raises ConfigError for an unknown algorithm, and as the algorithm
    does."""
    if algorithm not in ALGORITHMS:
        raise ConfigError("algorithm", algorithm, f"use one of {', '.join(ALGORITHMS)}")
    return [ALGORITHMS[algorithm](problem, terms) for problem in problems]


def _devices(problem: Problem) -> list[PlacementDevice]:
    return [PlacementDevice(d.name, d.memory_gb * GB) for d in problem.devices]


def _claims(problem: Problem) -> list[KvDemand]:
    """Demands in tokens/s per second: a problem does not state the KV bytes of a token."""
    return [
        KvDemand(
            m.name,
            m.weights_gb * GB,
            m.token_rate / m.tpot_slo,
            m.tp,
            (m.device,) if m.device else (),
        )
        for m in problem.models
    ]


def _tenant(m: PlacedModel, profile: DeviceProfile) -> Tenant:
    weights = m.weights_gb * GB
    kv = KV_BYTES_PER_WEIGHT_BYTE * weights
    traffic = Traffic(m.token_rate / OUTPUT_TOKENS, PROMPT_TOKENS, OUTPUT_TOKENS)
    if profile.hardware is None:
        raise ConfigError("device", profile.device, "one whose profile has `hardware`")
    hardware, reach = profile.hardware, max(1.0, profile.lane_reach)

    def costs(devices: int, share: float) -> StepCosts:
        """Return step costs by the data sheet.

        A token takes two operations for each parameter of 16 bits; a step reads all weights, at up
        to `reach` times its share of the bandwidth.
        """
        bandwidth = devices * hardware.memory_bandwidth * min(1.0, reach * share)
        reading = weights / bandwidth
        computing = weights / (devices * hardware.flops * share)
        return StepCosts(
            base=reading,
            per_token=computing,
            per_sequence=computing,
            per_pair=0.0,
            per_context=kv / bandwidth,
            hidden=0.0,
        )

    return Tenant(m.name, weights, kv, traffic, m.tpot_slo, costs, m.tp)
