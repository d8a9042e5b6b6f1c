"""Moves of weights stay bounded where requests always come for the model that went last."""

from __future__ import annotations

from collections import Counter

from ballast.core.event import FinishedOutput, Output, TokenOutput
from ballast.core.request import Submission
from ballast.policy.presets import resolve
from ballast.sim.cluster import Cluster, parse_kinds
from ballast.sim.model_catalogue import facts

MODELS, REQUESTS, GAP = 4, 16, 0.2
"""Of the models two fit, and a copy takes about as long as five requests take to come."""


def test_a_model_that_came_has_served_before_it_goes() -> None:
    """So no more models come than requests do, and none comes for nothing."""
    tokens: list[tuple[float, str]] = []
    ends = 0

    def received(device: str, at: float, output: Output) -> None:
        nonlocal ends
        if isinstance(output, TokenOutput):
            tokens.append((at, f"m{int(output.request_id) % MODELS}"))
        ends += isinstance(output, FinishedOutput)

    specs = [
        facts("Qwen3-14b").spec(max_model_len=2048, name=f"m{i}", fingerprint=f"m{i}")
        for i in range(MODELS)
    ]
    preset = resolve("ballast", placement="weights")
    cluster = Cluster(parse_kinds("H100-80G"), specs, preset, received)
    prompt = tuple(range(100))
    cluster.run(
        Submission(id=f"{i}", model=f"m{i % MODELS}", prompt=prompt, max_tokens=4, arrival=GAP * i)
        for i in range(REQUESTS)
    )
    (device,) = cluster.devices.values()
    device.state.validate()
    assert ends == REQUESTS
    came: dict[str, float] = {}
    stays: Counter[str] = Counter()
    for entry in device.story.entries:
        action, at = entry.get("action"), entry["at"]
        if "refused" in entry or action not in ("Activate", "Evict"):
            continue
        model = entry["model"]
        if action == "Activate":
            came[model] = at
        elif model in came:
            served = [m for t, m in tokens if m == model and came[model] <= t <= at]
            assert served, f"{model} came at {came[model]:.2f} for nothing"
            del came[model]
            stays[model] += 1
    assert len(stays) >= 3, "the models take turns"
    assert device.did("activations") < REQUESTS
