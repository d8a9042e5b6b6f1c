"""A generated workload through the engine's loop in virtual time, into a report."""

from __future__ import annotations

import json

from ballast.bench.record import RequestRecorder, prompts_of, submission_for
from ballast.bench.report import Report
from ballast.bench.sample import DeviceSample, MemorySample
from ballast.core.cost import StepCosts, activation_bytes
from ballast.core.link import LinkRates
from ballast.core.model import ModelSpec
from ballast.core.settings import DeviceSettings, FleetSettings, LinkSettings, Slo
from ballast.core.units import KiB
from ballast.engine.report import report as device_report
from ballast.engine.state import DeviceState
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.simulate import simulate
from ballast.workload.bursty import bursty_groups
from ballast.workload.workload import Workload

PAGE = 64 * KiB
NAMES = ["a", "b", "c"]
SLO = Slo(ttft=1.0, tpot=0.1)


def spec(name: str) -> ModelSpec:
    return ModelSpec(
        name=name, n_layers=2, n_heads=4, kv_heads=2, head_dim=32, hidden=128, intermediate=256,
        vocab=512, dtype="float32", max_model_len=512, block_tokens=16,
        segment_bytes=(20 * PAGE,), fingerprint=name, slo=SLO,
    )  # fmt: skip


def serve(workload: Workload, preset: str) -> Report:
    specs = [spec(name) for name in NAMES]
    arena = max(activation_bytes(s, 128, 16) for s in specs)
    fleet = FleetSettings(
        models=(),
        device=DeviceSettings(
            budget_bytes=80 * PAGE + arena + PAGE,
            page_bytes=PAGE,
            step_tokens=128,
            step_logits=16,
        ),
        link=LinkSettings(bytes_per_second=1e8),
        preset=preset,
    )
    costs = dict.fromkeys(NAMES, StepCosts(2e-3, 5e-5, 2e-4, 1e-7, 1e-9))
    profile = MachineProfile(costs=costs, link=LinkRates.even(1e8), overhead=1e-4)
    recorder = RequestRecorder()
    prompts = prompts_of(dict.fromkeys(NAMES, 512))
    submissions = [submission_for(r, prompts(r)) for r in workload.requests]
    for request, submission in zip(workload.requests, submissions, strict=True):
        recorder.sent(request, submission.id, request.at)
    memory: list[MemorySample] = []

    def observe(now: float, state: DeviceState) -> None:
        memory.append(MemorySample(now, {"sim": DeviceSample.of(device_report(state, "sim"))}))

    ran = simulate(fleet, specs, submissions, profile, recorder.record, observe=observe)
    slos = dict.fromkeys(NAMES, SLO)
    return Report.of(recorder.records(), slos, ran.seconds, memory, name=preset)


def test_a_generated_workload_is_answered_and_reported_in_virtual_time() -> None:
    workload = bursty_groups(NAMES, 60.0, seed=4).scale_lengths(max_prompt=200, max_output=40)
    report = serve(workload, "balloon")
    assert report.total.answered == report.total.requests == len(workload.requests)
    assert report.total.output_tokens == sum(r.output_tokens for r in workload.requests)
    assert report.total.prompt_tokens == sum(r.prompt_tokens for r in workload.requests)
    assert all(r.sent == r.at and r.ttft is not None and r.ttft > 0 for r in report.records)
    totals = {sum(sample.owners.values()) for sample in report.memory}
    assert len(totals) == 1, "owners and free pages add up to the pool at every moment"
    again = serve(workload, "balloon")
    assert json.dumps(again.to_json()) == json.dumps(report.to_json())
