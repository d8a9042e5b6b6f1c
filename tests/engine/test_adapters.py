"""Adapters in the live engine: exact under pressure, apart in the prefix cache, with their base."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ballast.bench.inprocess import Answer, InProcess
from ballast.core.event import ArrivalEvent, FailedOutput
from ballast.core.request import Sampling, Submission
from ballast.core.settings import AdapterSettings, DeviceSettings, FleetSettings, ModelSettings, Slo
from ballast.core.units import KiB, MiB
from ballast.engine.events import handle
from ballast.live.device import LiveDevice
from benchmarks.adapters import RandomAdapter, merged, random_adapter
from tests.engine.checkpoints import VOCAB, make_llama
from tests.engine.gpus import beside, on_gpu, serving
from tests.memory.fake_cuda import FakeDriver

SLO = Slo(ttft=0.2, tpot=0.1)
NAMES = ("base", "x", "y", "z", "other")


class World:
    """A base with three adapters (two of one rank), and a model that wants its memory."""

    def __init__(self, root: Path) -> None:
        self.base = make_llama(root / "base", 1)
        self.other = make_llama(root / "other", 2, num_hidden_layers=3)
        self.models: dict[str, nn.Module] = {
            p.name: AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32).eval()
            for p in (self.base, self.other)
        }
        model = self.models["base"]
        self.adapters: dict[str, RandomAdapter] = {
            "x": random_adapter(model, root / "x", 3),
            "y": random_adapter(model, root / "y", 4),
            "z": random_adapter(model, root / "z", 5, rank=5, only=("v_proj", "lm_head"), rs=True),
        }

    def fleet(self, **device: int) -> FleetSettings:
        adapters = tuple(
            AdapterSettings(name=n, path=str(a.path)) for n, a in self.adapters.items()
        )
        models = (
            ModelSettings(
                name="base", path=str(self.base), dtype="float32", slo=SLO, adapters=adapters
            ),
            ModelSettings(name="other", path=str(self.other), dtype="float32", slo=SLO),
        )
        sizes = {"budget_bytes": 64 * MiB, "page_bytes": 64 * KiB, "threads": 1, **device}
        settings = DeviceSettings(step_tokens=32, step_logits=8, **sizes)
        return FleetSettings(models=models, device=settings)

    def pages(self) -> int:
        """For the larger model and the KV of two long requests: too few for both models, and for
        the KV of all that is asked of one, however fast requests and copies are."""
        with InProcess(self.fleet()) as server:
            state = server.device.state
            weights = [m.weights.pages for m in state.models.values()]
            models = state.models.values()
            kv = max(m.kv.layout.pages(-(-180 // m.spec.block_tokens)) for m in models)
        assert 2 * kv < min(weights)
        return max(weights) + 2 * kv

    def tight(self) -> FleetSettings:
        """With these pages beside the arena."""
        settings = self.fleet()
        with InProcess(settings) as server:
            pages = server.device.state.arena.pages + self.pages()
        device = replace(settings.device, budget_bytes=pages * settings.device.page_bytes)
        return replace(settings, device=device)

    def check(self, request: Submission, answer: Answer) -> None:
        """Greedy tokens and their log-probabilities are those of the merged model."""
        adapter = self.adapters.get(request.model)
        if adapter is None:
            logits = self._logits(self.models[request.model], request, answer)
        else:
            with merged(self.models["base"], adapter) as model:
                logits = self._logits(model, request, answer)
        top = logits.topk(2, dim=-1)
        for i, token in enumerate(answer.tokens):
            tie = float(top.values[i, 0] - top.values[i, 1]) < 1e-4
            assert token == int(top.indices[i, 0]) or tie
            ours = answer.logprobs[i]
            assert ours is not None
            assert abs(ours - float(logits[i].log_softmax(-1)[token])) < 1e-4

    @staticmethod
    def _logits(model: nn.Module, request: Submission, answer: Answer) -> torch.Tensor:
        assert answer.finished.output_tokens == request.max_tokens
        ids = torch.tensor([[*request.prompt, *answer.tokens]])
        with torch.inference_mode():
            logits: torch.Tensor = model(ids).logits[0, len(request.prompt) - 1 : -1]
        return logits


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def asked(model: str, i: int, tokens: int = 40) -> Submission:
    return Submission(
        id=f"{model}{i}",
        model=model,
        prompt=tuple((7 * i + 3 * k) % VOCAB for k in range(5 + 23 * i)),
        max_tokens=tokens,
        sampling=Sampling(logprobs=0),
        ignore_eos=True,
    )


def test_eviction_and_preemption_change_no_token(world: World) -> None:
    requests = [asked(name, i, 60) for i in range(2, 5) for name in NAMES]
    with InProcess(world.tight()) as server:
        mixed = 0
        run = server.device.executors["base"][0].run

        def look(work: list[object]) -> object:
            nonlocal mixed
            mixed += len({w.adapter for w in work}) > 2  # type: ignore[attr-defined]
            return run(work)  # type: ignore[arg-type]

        server.device.executors["base"][0].run = look  # type: ignore[method-assign, assignment]
        answers = server.generate(requests)
        report = server.device.snapshot()
        server.device.state.pool.validate()
    assert [m.name for m in report.models] == ["base", "other"]
    assert sum(m.evictions for m in report.models) > 0
    assert sum(m.preemptions for m in report.models) > 0
    assert mixed > 0, "no job had several adapters"
    for r in requests:
        world.check(r, answers[r.id])
    outputs = {tuple(answers[f"{name}4"].tokens) for name in NAMES}
    assert len(outputs) == len(NAMES), "the adapters change nothing"


def test_on_a_gpu_tokens_are_those_of_a_cpu(world: World) -> None:
    requests = [asked(name, i, 40) for i in range(2, 5) for name in NAMES]
    with InProcess(world.fleet()) as server:
        alone = server.generate(requests)
    tight = beside(on_gpu(world.fleet()), world.pages())
    driver = FakeDriver(n_bytes=1 << 30)
    with serving(tight, driver) as server:
        assert not server.device.failed
        answers = server.generate(requests)
        report = server.device.snapshot()
        segments = sum(len(s.segment_bytes) for s in server.device.specs.values())
        assert len(driver.pinned) == segments, "adapters' matrices are page-locked, too"
        server.device.state.pool.validate()
    assert sum(m.evictions + m.preemptions for m in report.models) > 0
    for key, answer in answers.items():
        assert answer.tokens == alone[key].tokens, key
    assert driver.is_clean()


def test_prefixes_of_one_adapter_are_no_other_s(world: World) -> None:
    prompt = tuple(range(60))
    with InProcess(world.fleet()) as server:
        for name in ("base", "x", "y"):
            for turn, cached in (("cold", 0), ("warm", 48)):
                request = replace(asked(name, 0, 8), id=f"{name}-{turn}", prompt=prompt)
                answer = server.generate([request])[request.id]
                assert answer.finished.cached_tokens == cached
                world.check(request, answer)
        # A tenant's salt cannot lead to what an adapter has cached.
        spec = server.device.specs["base"]
        for salt in (spec.adapters[0].fingerprint, f"{spec.adapters[0].fingerprint}:"):
            request = replace(asked("base", 0, 8), id=salt, prompt=prompt, salt=salt)
            assert server.generate([request])[salt].finished.cached_tokens == 0


def test_an_adapter_that_fails_takes_no_other_along(world: World, tmp_path: Path) -> None:
    settings = world.fleet()
    (tmp_path / "empty").mkdir()
    base = settings.models[0]
    broken = AdapterSettings(name="broken", path=str(tmp_path / "empty"))
    base = replace(base, adapters=(broken, *base.adapters))
    with InProcess(replace(settings, models=(base,))) as server:
        assert "adapter_config.json" in server.device.failed["broken"]
        assert [a.name for a in server.device.specs["base"].adapters] == ["x", "y", "z"]
        requests = [asked(name, 1, 8) for name in ("base", "x", "y", "z", "broken")]
        answers = server.generate(requests)
    for r in requests[:-1]:
        world.check(r, answers[r.id])
    end = answers["broken1"].end
    assert isinstance(end, FailedOutput)
    assert end.code == "model_not_found"


def test_without_a_base_there_are_no_adapters(world: World, tmp_path: Path) -> None:
    base = replace(world.fleet().models[0], path=str(tmp_path))
    with InProcess(replace(world.fleet(), models=(base, world.fleet().models[1]))) as server:
        assert set(server.device.failed) == {"base", "x", "y", "z"}
        assert "its base base is not served" in server.device.failed["x"]


def test_an_adapter_has_a_queue_of_its_own(world: World) -> None:
    settings = world.fleet()
    base = settings.models[0]
    short = replace(base.adapters[0], max_waiting=1)
    base = replace(base, max_waiting=3, adapters=(short, *base.adapters[1:]))
    device = LiveDevice(replace(settings, models=(base,)), lambda outputs: None)
    try:
        result = [
            handle(device.state, ArrivalEvent(asked(name, i)))
            for i, name in enumerate(["x", "x", "y", "base", "base"])
        ]
    finally:
        device.close()
    reasons = [[o.reason for o in outputs if isinstance(o, FailedOutput)] for outputs in result]
    one, three = ["1 requests of 'x' wait already"], ["3 requests of 'base' wait already"]
    assert reasons == [[], one, [], [], three]
