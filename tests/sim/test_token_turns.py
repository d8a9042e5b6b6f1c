"""Turns of whole models that end between two tokens: `swap` with `preemptive`."""

from __future__ import annotations

from ballast.core.event import FinishedOutput, Output, TokenOutput
from ballast.core.request import Submission
from ballast.policy.presets import resolve
from ballast.sim.cluster import Cluster, parse_kinds
from ballast.sim.model_catalogue import facts


def served(preemptive: float) -> tuple[Cluster, dict[str, float], dict[str, int]]:
    """Two models, each with one long answer: first tokens by model, and prefilled tokens."""
    first: dict[str, float] = {}
    ends = 0

    def received(device: str, at: float, output: Output) -> None:
        nonlocal ends
        if isinstance(output, TokenOutput):
            first.setdefault(output.request_id, at)
        ends += isinstance(output, FinishedOutput)

    specs = [facts("Llama-3-8b").spec(max_model_len=4096, name=n, fingerprint=n) for n in "ab"]
    options = {"preemptive": preemptive, "quantum": 0.3}
    preset = resolve("swap", options, placement="weights")
    cluster = Cluster(parse_kinds("GH200-96G"), specs, preset, received)
    prompt = tuple(range(600))
    cluster.run(
        Submission(id=name, model=name, prompt=prompt, max_tokens=200, arrival=0.5 * i)
        for i, name in enumerate("ab")
    )
    (device,) = cluster.devices.values()
    device.state.validate()
    assert ends == 2
    tokens = dict.fromkeys("ab", 0)
    for entry in device.story.entries:
        if entry.get("event") == "JobDone":
            tokens[entry["model"]] += entry["prefill_tokens"]
    return cluster, first, tokens


def test_a_turn_ends_between_tokens_and_requests_go_on_from_their_kv() -> None:
    whole, late, _ = served(0)
    turns, soon, tokens = served(1)
    assert soon["b"] < late["b"] - 0.3, "it does not wait for the whole answer"
    (device,) = turns.devices.values()
    switches = device.did("evictions")
    assert device.did("preemptions") == 0, "KV stays"
    assert switches >= 4 > next(iter(whole.devices.values())).did("evictions")
    block = 16
    assert sum(tokens.values()) <= 2 * 600 + switches * block, "only what no full block holds"
