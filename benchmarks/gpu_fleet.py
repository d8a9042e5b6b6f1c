"""Three small Llamas on one GPU that has memory for two: their tokens, against `transformers`.

`python -m benchmarks.gpu_fleet`: one quick run in float32, which `compute-sanitizer` can watch.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ballast.bench.inprocess import Answer, InProcess
from ballast.cluster.machine_choice import machine_of
from ballast.core.request import Submission
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.core.units import GiB, MiB, ceil_div
from ballast.live.machine import MakeMachine
from benchmarks.random_stages import RandomStages
from benchmarks.rotations import RandomRotations

PAGE = 2 * MiB
MARGIN = 1e-4
"""Logits of the reference that are nearer to each other than this are a tie."""
VOCAB, LONGEST = 1024, 512
DEVICE = DeviceSettings(name="cuda:0", budget_bytes=4 * GiB, page_bytes=PAGE, step_tokens=64)
"""Roomy; `tight` takes away what is too much."""
SWAPPED_KV = 64 * MiB
"""More memory where KV is swapped: with few blocks beside, no layer could leave."""
Answers = Mapping[str, Answer]


def make_models(home: Path, dtype: str, hidden: int, impl: str) -> tuple[ModelSettings, ...]:
    """Checkpoints of random weights, and their settings."""
    made = []
    for i, name in enumerate("abc"):
        torch.manual_seed(i)
        config = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=VOCAB,
            max_position_embeddings=LONGEST,
            initializer_range=0.1,
            tie_word_embeddings=False,
        )
        LlamaForCausalLM(config).save_pretrained(home / name)
        path = str(home / name)
        made.append(ModelSettings(name=name, path=path, dtype=dtype, model_impl=impl))
    return tuple(made)


def requests_for(
    models: Sequence[ModelSettings], each: int = 4, tokens: int = 48
) -> list[Submission]:
    """Greedy, of prompts of different lengths."""
    return [
        Submission(
            id=f"{m.name}{i}",
            model=m.name,
            prompt=tuple((7 * i + 3 * k + ord(m.name)) % VOCAB for k in range(9 + 30 * i)),
            max_tokens=tokens,
            ignore_eos=True,
        )
        for i in range(each)
        for m in models
    ]


def tight(
    models: tuple[ModelSettings, ...],
    device: DeviceSettings,
    make: MakeMachine = machine_of,
    resident: int = 2,
) -> FleetSettings:
    """A fleet on memory for `resident` of its models and some of their KV."""
    fleet = FleetSettings(models=models, device=device)
    with InProcess(fleet, make_machine=make) as server:
        state = server.device.state
        weights = max(m.weights.pages for m in state.models.values())
        there = state.models.values()
        kv = max(m.kv.layout.pages(ceil_div(200, m.spec.block_tokens)) for m in there)
        n = state.set_aside + resident * weights + 3 * kv
    return replace(fleet, device=replace(device, budget_bytes=n * device.page_bytes))


def served(
    fleet: FleetSettings,
    requests: Sequence[Submission],
    make: MakeMachine = machine_of,
    rotating: bool = False,
) -> tuple[list[Answers], dict[str, Any]]:
    """Answers of two rounds, the second with the graphs that were recorded after the first; what
    happened. `rotating`: layers do, in other ways every few milliseconds; so many KV blocks are on
    the host, more or fewer each time, where the fleet's preset is `kvswap`."""
    with InProcess(fleet, make_machine=make) as server:
        device = server.device
        loop = device.loop
        staged: set[tuple[str, int]] = set()
        if rotating:
            loop.use_preset(replace(loop.preset, memory=RandomRotations(loop.preset.memory)))
        if fleet.preset == "kvswap":
            loop.use_preset(replace(loop.preset, memory=RandomStages(loop.preset.memory)))
            server.listen = lambda now, output: staged.update(
                (name, len(m.kv.staged)) for name, m in device.state.models.items() if m.kv.staged
            )
        rounds: list[Answers] = []
        for i in range(2):
            rounds.append(server.generate([replace(r, id=f"{r.id}/{i}") for r in requests]))
            _let_it_record(server)
        server.drain()
        report = device.snapshot()
        result = {
            "evictions": sum(m.evictions for m in report.models),
            "preemptions": sum(m.preemptions for m in report.models),
            "graphs": 0 if report.graphs is None else report.graphs.graphs,
            "replays": 0 if report.graphs is None else report.graphs.replays,
            "layers_loaded": sum(
                m.weights.stream.loads.n
                for m in device.state.models.values()
                if m.weights.stream is not None
            ),
            "kv_moves": len(staged),
        }
        device.state.pool.validate()
    return rounds, result


def compared(
    models: Sequence[ModelSettings],
    requests: Sequence[Submission],
    rounds: Sequence[Answers],
    device: torch.device,
) -> dict[str, int]:
    """Our tokens, each against the reference's choice after the same tokens."""
    result = dict.fromkeys(
        ("tokens", "wrong", "ties", "reference_differs_from_itself_in_a_batch_of_two"), 0
    )
    for m in models:
        kind = getattr(torch, m.dtype)
        reference = AutoModelForCausalLM.from_pretrained(m.path, dtype=kind).to(device).eval()
        for i, answers in enumerate(rounds):
            for r in (r for r in requests if r.model == m.name):
                answer = answers[f"{r.id}/{i}"]
                assert answer.finished.output_tokens == len(answer.tokens) == r.max_tokens
                ids = torch.tensor([[*r.prompt, *answer.tokens]], device=device)
                with torch.inference_mode():
                    logits = reference(ids).logits[0, len(r.prompt) - 1 : -1].float()
                    twice = reference(ids.repeat(2, 1)).logits[0, len(r.prompt) - 1 : -1]
                top = logits.topk(2, dim=-1)
                differs = top.indices[:, 0] != torch.tensor(answer.tokens, device=device)
                tie = top.values[:, 0] - top.values[:, 1] < MARGIN
                result["tokens"] += len(answer.tokens)
                result["wrong"] += int((differs & ~tie).sum())
                result["ties"] += int((differs & tie).sum())
                again = top.indices[:, 0] != twice.argmax(-1)
                result["reference_differs_from_itself_in_a_batch_of_two"] += int(again.sum())
    return result


def proved(
    dtype: str,
    torch_device: torch.device,
    device: DeviceSettings = DEVICE,
    make: MakeMachine = machine_of,
    hidden: int = 512,
    each: int = 4,
    tokens: int = 48,
    lanes: int = 1,
    rotating: bool = False,
    impl: str = "auto",
    swapping: bool = False,
) -> dict[str, Any]:
    """All of it: what was compared, and what happened meanwhile. `swapping`: KV is swapped, with
    memory for all models."""
    device = replace(device, lanes=lanes)
    with tempfile.TemporaryDirectory() as home:
        models = make_models(Path(home), dtype, hidden, impl)
        requests = requests_for(models, each, tokens)
        fleet = tight(models, device, make, resident=len(models) if swapping else 2)
        if swapping:
            budget = fleet.device.budget_bytes + SWAPPED_KV
            device = replace(fleet.device, budget_bytes=budget)
            fleet = replace(fleet, device=device, preset="kvswap", options={"pooled": 1})
        rounds, result = served(fleet, requests, make, rotating)
        if torch_device.type == "cuda":
            forget_gpu()
        return {**compared(models, requests, rounds, torch_device), **result}


def forget_gpu() -> None:
    """Free what a device that is gone leaves in this process: PyTorch's cap, and cuBLAS's
    workspaces, of which each thread and stream had one."""
    torch.cuda.synchronize()
    allocator: Any = torch._C
    allocator._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0, 0)


def _let_it_record(server: InProcess, seconds: float = 5.0) -> None:
    """Until no further graph comes."""
    ends, before = time.monotonic() + seconds, -1
    while (result := server.device.machine.graphs) is not None and time.monotonic() < ends:
        if result.graphs == before or result.cap_bytes == 0:
            return
        before = result.graphs
        time.sleep(0.3)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--lanes", type=int, default=1)
    args = parser.parse_args(argv)
    found = proved("float32", torch.device("cuda", 0), each=2, lanes=args.lanes)
    print(json.dumps(found))
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
