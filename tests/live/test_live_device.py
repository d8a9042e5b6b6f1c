"""The live engine on tiny real models: exact under pressure, confined to its budget, forgiving."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ballast.bench.inprocess import Answer, InProcess
from ballast.core.event import CancelledOutput, FailedOutput, Output, TokenOutput
from ballast.core.report import DeviceReport
from ballast.core.request import Sampling, Submission
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings, Slo
from ballast.core.units import KiB, MiB
from ballast.policy.presets import PRESETS
from tests.engine.checkpoints import VOCAB, make_llama

NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {n: make_llama(root / n, i, num_hidden_layers=2 + i) for i, n in enumerate(NAMES)}


def fleet(
    paths: dict[str, Path], pages: int | None = None, preset: str = "balloon"
) -> FleetSettings:
    """All models in float32; `pages` beside the arena, or plenty."""
    models = tuple(
        ModelSettings(name=n, path=str(p), dtype="float32", slo=Slo(ttft=0.2, tpot=0.1))
        for n, p in paths.items()
    )
    device = DeviceSettings(
        budget_bytes=64 * MiB, page_bytes=64 * KiB, step_tokens=32, step_logits=8, threads=1
    )
    settings = FleetSettings(models=models, device=device, preset=preset)
    if pages is None:
        return settings
    with InProcess(settings) as server:
        arena = server.device.state.arena.pages
    return replace(
        settings, device=replace(device, budget_bytes=(arena + pages) * device.page_bytes)
    )


def asked(n: int, temperature: float = 0.0, models: tuple[str, ...] = NAMES) -> list[Submission]:
    return [
        Submission(
            id=f"{model}{i}",
            model=model,
            prompt=tuple((7 * i + 3 * k + ord(model)) % VOCAB for k in range(5 + 23 * i)),
            max_tokens=40,
            sampling=Sampling(temperature=temperature, seed=i, logprobs=0),
            ignore_eos=True,
        )
        for i in range(n)
        for model in models
    ]


def need(paths: dict[str, Path]) -> int:
    """Pages for the two largest models and KV of some long requests: too few for three models, so
    that one has to be evicted, however fast requests and copies are."""
    with InProcess(fleet(paths)) as server:
        models = server.device.state.models.values()
        weights = sorted(m.weights.pages for m in models)
        kv = max(m.kv.layout.pages(-(-140 // m.spec.block_tokens)) for m in models)
    return sum(weights[-2:]) + min(4 * kv, weights[0] - 1)


def for_one(paths: dict[str, Path]) -> FleetSettings:
    """Model c alone, with pages for the longest request that is asked of it. Requests of several
    are admitted with their prompts and outgrow that before the first ends: some are preempted."""
    settings = fleet({"c": paths["c"]})
    with InProcess(settings) as server:
        (m,) = server.device.state.models.values()
        pages = m.weights.pages + m.kv.layout.pages(-(-140 // m.spec.block_tokens))
        pages += server.device.state.arena.pages
    device = replace(settings.device, budget_bytes=pages * settings.device.page_bytes)
    return replace(settings, device=device)


def served(
    settings: FleetSettings, requests: list[Submission]
) -> tuple[dict[str, Answer], DeviceReport]:
    """What comes of the requests, and of the device."""
    with InProcess(settings) as server:
        server.generate(requests)
        report = server.device.snapshot()
        server.drain()
        for m in server.device.state.models.values():
            m.kv.validate([])
            m.weights.validate()
        server.device.state.pool.validate()
    return server.answers, report


def check(path: Path, requests: list[Submission], answers: dict[str, Answer]) -> None:
    """Greedy tokens and their log-probabilities are those of `transformers`."""
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for r in requests:
        answer = answers[r.id]
        assert answer.finished.output_tokens == 40
        ids = torch.tensor([[*r.prompt, *answer.tokens]])
        with torch.inference_mode():
            logits = reference(ids).logits[0, len(r.prompt) - 1 : -1]
        top = logits.topk(2, dim=-1)
        for i, token in enumerate(answer.tokens):
            tie = float(top.values[i, 0] - top.values[i, 1]) < 1e-4
            assert token == int(top.indices[i, 0]) or tie
            ours = answer.logprobs[i]
            assert ours is not None
            assert abs(ours - float(logits[i].log_softmax(-1)[token])) < 1e-4
    # A test on output that repeats one token would prove nothing.
    assert len(set(answers[requests[-1].id].tokens)) > 8


@pytest.mark.parametrize("preset", ["swap", "balloon"])
def test_eviction_changes_no_token(paths: dict[str, Path], preset: str) -> None:
    requests = asked(5)
    settings = fleet(paths, need(paths), preset)
    answers, report = served(settings, requests)
    assert sum(m.evictions for m in report.models) > 0
    for name, path in paths.items():
        check(path, [r for r in requests if r.model == name], answers)


def test_a_context_beyond_the_models_own_is_said_and_the_models_own_counts(
    paths: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    settings = fleet({"a": paths["a"]})
    (model,) = settings.models
    with InProcess(settings) as server:
        own = server.device.state.models["a"].spec.max_model_len
    assert not caplog.messages
    for context in (own, own + 1):
        asked = replace(settings, models=(replace(model, max_model_len=context),))
        with InProcess(asked) as server:
            assert server.device.state.models["a"].spec.max_model_len == own
    (said,) = caplog.messages
    assert said == (
        f"a: limits.context of {own + 1} is beyond the model's own context; {own} tokens are served"
    )


def test_preemption_changes_no_token(paths: dict[str, Path]) -> None:
    requests = asked(5, models=("c",))
    answers, report = served(for_one(paths), requests)
    assert report.models[0].preemptions > 0
    check(paths["c"], requests, answers)


def test_sampling_goes_on_after_a_preemption_with_the_tokens_it_would_have_had(
    paths: dict[str, Path],
) -> None:
    requests = asked(5, temperature=0.9, models=("c",))
    disturbed, report = served(for_one(paths), requests)
    assert report.models[0].preemptions > 0
    with InProcess(fleet({"c": paths["c"]})) as server:
        for r in requests:
            alone = server.generate([r])[r.id]
            assert alone.tokens == disturbed[r.id].tokens


@pytest.mark.parametrize("preset", PRESETS)
def test_ledger_and_operating_system_agree_after_a_run(paths: dict[str, Path], preset: str) -> None:
    with InProcess(fleet(paths, need(paths) + 40, preset)) as server:
        server.generate(asked(3))
        state = server.device.state
        for m in state.models.values():
            m.kv.validate([])
            owned = state.pool.ledger.owned(f"kv:{m.spec.name}")
            assert m.kv.book.backing.os_backed() == owned == m.kv.pages
            weights = state.pool.ledger.owned(f"weights:{m.spec.name}")
            assert m.weights.range.os_backed() == weights
        state.arena.validate()
        state.pool.validate()


def test_the_budget_holds_in_physical_memory(paths: dict[str, Path]) -> None:
    """Device memory and what jobs allocate beside it stay within the budget (invariant 4)."""
    settings = fleet(paths, need(paths))
    with InProcess(settings) as server:
        peak = 0

        def look(now: float, output: Output) -> None:
            nonlocal peak
            peak = max(peak, server.device.vm.physical_bytes())

        server.listen = look
        server.generate(asked(5))
        arena = server.device.state.arena.pages * settings.device.page_bytes
    assert 0 < peak <= settings.device.budget_bytes - arena


def test_a_cancelled_request_frees_its_memory(paths: dict[str, Path]) -> None:
    settings = fleet(paths)
    settings = replace(settings, device=replace(settings.device, prefix_cache=False))
    with InProcess(settings) as server:
        (request,) = asked(1, models=("a",))
        request = replace(request, max_tokens=200)

        def leave(now: float, output: Output) -> None:
            if isinstance(output, TokenOutput) and output.index == 3:
                server.cancel(output.request_id)

        server.listen = leave
        answer = server.generate([request])[request.id]
        assert isinstance(answer.end, CancelledOutput)
        assert len(answer.tokens) < 200
        assert server.device.state.models["a"].kv.pages == 0


def test_a_broken_checkpoint_does_not_stop_the_rest(paths: dict[str, Path], tmp_path: Path) -> None:
    broken = make_llama(tmp_path / "broken", 9)
    file = next(broken.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1000])
    with InProcess(fleet({"broken": broken, "a": paths["a"]})) as server:
        assert "broken" in server.device.failed
        assert file.name in server.device.failed["broken"]
        answers = server.generate(asked(2, models=("a",)))
        assert all(a.finished for a in answers.values())


def test_a_job_that_raises_fails_its_requests_only(paths: dict[str, Path]) -> None:
    with InProcess(fleet(paths)) as server:
        victim = server.device.executors["b"][0]

        def broken(work: object) -> list[object]:
            raise RuntimeError("the kernel is on fire")

        victim.run = broken  # type: ignore[method-assign, assignment]
        answers = server.generate(asked(2))
        for key, answer in answers.items():
            if key.startswith("b"):
                assert isinstance(answer.end, FailedOutput)
                assert "on fire" in answer.end.reason
            else:
                assert answer.finished


def test_prefixes_are_shared_between_requests(paths: dict[str, Path]) -> None:
    with InProcess(fleet(paths)) as server:
        (first,) = asked(1, models=("a",))
        first = replace(first, prompt=first.prompt * 10)
        again = replace(first, id="again")
        cold = server.generate([first])[first.id]
        warm = server.generate([again])["again"]
        assert cold.finished.cached_tokens == 0
        assert warm.finished.cached_tokens == 48
        assert warm.tokens == cold.tokens


def test_the_story_is_written(paths: dict[str, Path], tmp_path: Path) -> None:
    settings = replace(fleet(paths), story_path=str(tmp_path / "story.jsonl"))
    with InProcess(settings) as server:
        server.generate(asked(1))
    entries = [json.loads(line) for line in (tmp_path / "story.jsonl").read_text().splitlines()]
    assert [e["event"] for e in entries if e.get("event") == "Arrival"] == ["Arrival"] * 3
    assert sum(e.get("action") == "Activate" for e in entries) == 3
    assert all(e["at"] >= 0 for e in entries)
