"""A group of two GPUs, in earnest: NCCL, and a process for each."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from ballast.bench.inprocess import InProcess
from ballast.core.request import Sampling, Submission
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.core.units import MiB
from ballast.engine.sizing import GPU_LANE_BYTES
from tests.engine.checkpoints import VOCAB, make_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="PyTorch finds no two GPUs"),
    # `scripts/gpu_check` is to run without it.
    pytest.mark.skipif(find_spec("msgspec") is None, reason="ranks talk through msgspec"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_its_tokens_are_those_of_a_cpu(tmp_path: Path, dtype: str) -> None:
    """Two models, of which one is there at a time. In bfloat16 sums round otherwise: all is
    answered, to its end."""
    models = tuple(
        ModelSettings(name=name, path=str(make_llama(tmp_path / name, seed)), dtype=dtype)
        for seed, name in enumerate("ab")
    )
    requests = [
        Submission(
            id=f"{m.name}{i}",
            model=m.name,
            prompt=tuple((7 * i + 3 * k) % VOCAB for k in range(5 + 9 * i)),
            max_tokens=30,
            sampling=Sampling(temperature=0.7 * (i % 2), seed=i),
            ignore_eos=True,
        )
        for i in range(6)
        for m in models
    ]
    cpu = FleetSettings(
        models=models,
        device=DeviceSettings(budget_bytes=64 * MiB, step_tokens=32, step_logits=8),
        preset="swap",
    )
    gpus = replace(
        cpu.device,
        name="cuda:0",
        tensor_parallel=2,
        page_bytes=2 * MiB,
        # Four segments, each on a page of its own, KV, and what jobs need.
        budget_bytes=2 * (GPU_LANE_BYTES + (4 + 2 + 4) * 2 * MiB),
    )
    with InProcess(cpu) as one:
        expected = one.generate(requests)
    with InProcess(replace(cpu, device=gpus)) as group:
        found = group.generate(requests)
        report = group.device.snapshot()
    assert sum(m.evictions for m in report.models) > 0
    for id, answer in found.items():
        assert answer.finished.reason == "length"
        assert dtype != "float32" or answer.tokens == expected[id].tokens
