"""Passes of a GPU's executors that read weights in host memory: no logit changes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ballast.core.errors import BrokenPromise
from ballast.core.job import SequenceWork
from ballast.core.settings import AdapterSettings
from ballast.kernels.plain.attention import PlainAttention
from ballast.models.gpu.executor import GpuExecutor
from ballast.models.gpu.fused import GpuFusedModel
from ballast.models.gpu.graphs import GraphCache
from ballast.weights.segment import PackedTensor
from benchmarks.adapters import random_adapter
from benchmarks.families import config, make
from tests.models.fake_graphs import Recorders, StaticAttention
from tests.models.gpu.test_gpu_executor import prompts_of
from tests.models.host_served import NOT_A_NUMBER, HostServed
from tests.models.tiny import GREEDY, llama

STREAM = 7


def job(tokens: Sequence[int], start: int = 0, adapter: int | None = None) -> SequenceWork:
    return SequenceWork("a", list(tokens), start, [1, 2], GREEDY, adapter)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("impl", ["generic", "fused"])
def test_no_mix_of_places_changes_a_logit(
    tmp_path: Path, impl: str, dtype: str, tied: bool
) -> None:
    llama(tmp_path, tie_word_embeddings=tied)
    served = HostServed(tmp_path, attention=PlainAttention, model_impl=impl, dtype=dtype)
    assert isinstance(served.model, GpuFusedModel) is (impl == "fused")
    (prompt,), n = prompts_of(20), len(served.spec.segment_bytes)
    jobs = (job(prompt), job(prompt[:1], 20))
    expected = [served.logits(j) for j in jobs]
    for units in ((), (1, 3), (0,), (n - 1,), range(n), (2,), ()):
        served.read(units, 0.5)
        for j, logits in zip(jobs, expected, strict=True):
            assert torch.equal(served.logits(j), logits)
    served.close()


@pytest.mark.parametrize("impl", ["generic", "fused"])
def test_graphs_are_those_of_passes_that_read_nothing_on_the_host(
    tmp_path: Path, impl: str
) -> None:
    llama(tmp_path)
    served = HostServed(tmp_path, attention=StaticAttention, model_impl=impl)
    model = served.model
    assert isinstance(model, GpuExecutor)
    recorders = Recorders(graph_bytes=1 << 20)
    graphs = model._graphs = GraphCache(1 << 30, recorders)
    (prompt,) = prompts_of(20)
    served.logits(job(prompt))

    def decode() -> torch.Tensor:
        with graphs.on(STREAM):
            return served.logits(job(prompt[:1], 20))

    served.read((1, 2))
    in_place = decode()
    assert not graphs.wanted
    served.read(())
    plain = decode()
    assert graphs.wanted == 1
    served.read((2,))
    decode()  # and is recorded while the model reads in place
    graphs.record_one()
    served.read((1,))
    assert torch.equal(decode(), in_place)
    assert graphs.report().replays == 0
    served.read(())
    torch.testing.assert_close(decode(), plain, rtol=0, atol=1e-5)
    assert graphs.report().replays == 1
    graphs.close()
    served.close()


@pytest.mark.parametrize("impl", ["generic", "fused"])
def test_adapters_may_lie_on_the_host_too(tmp_path: Path, impl: str) -> None:
    reference = llama(tmp_path / "base", tie_word_embeddings=False)
    random_adapter(reference, tmp_path / "x", 1, rank=3)
    random_adapter(reference, tmp_path / "y", 2, rank=2, only=("q_proj", "lm_head"))
    adapters = tuple(AdapterSettings(name=n, path=str(tmp_path / n)) for n in ("x", "y"))
    served = HostServed(
        tmp_path / "base", attention=PlainAttention, model_impl=impl, adapters=adapters
    )
    (prompt,), n = prompts_of(20), len(served.spec.segment_bytes)
    jobs = [job(prompt, adapter=adapter) for adapter in (0, 1, None)]
    expected = [served.logits(j) for j in jobs]
    assert not torch.equal(expected[0], expected[2])
    for units in ((n - 1,), (n - 2, 1), range(n), ()):
        served.read(units)
        for j, logits in zip(jobs, expected, strict=True):
            assert torch.equal(served.logits(j), logits)
    served.close()


def test_experts_that_no_token_chose_are_not_read(tmp_path: Path) -> None:
    """In host memory as on the device: they are no numbers there while the others are used."""
    make(tmp_path, config("mixtral", vocab_size=331, num_local_experts=8, num_experts_per_tok=2))
    served = HostServed(tmp_path, attention=PlainAttention, model_impl="generic")
    model = served.model
    assert isinstance(model, GpuExecutor)
    chosen: dict[int, set[int]] = {}
    for i, layer in enumerate(experts_of(model)):
        note = noted(chosen.setdefault(i, set()))
        layer.register_forward_pre_hook(note, with_kwargs=True)
    prompt = job([3, 14, 15])
    expected = served.logits(prompt)
    n = len(served.spec.segment_bytes)
    memory = [np.array(served.weights[i]) for i in range(n)]
    unchosen = 0
    for i, used in chosen.items():
        for packed in served.host.segments[1 + i].tensors:
            if "experts" in packed.names[0]:
                for expert in set(range(8)) - used:
                    spoil(memory[1 + i], packed, expert)
                    unchosen += 1
    assert unchosen > 0
    model._pointers = tuple(m.ctypes.data for m in memory)
    served.read(range(n))
    assert torch.equal(served.logits(prompt), expected)
    for i, used in chosen.items():
        for packed in served.host.segments[1 + i].tensors:
            if "experts" in packed.names[0]:
                spoil(memory[1 + i], packed, min(used))
    assert not served.logits(prompt).isfinite().all(), "it would show"
    served.close()


def experts_of(model: GpuExecutor) -> list[torch.nn.Module]:
    module: torch.nn.Module = model._module  # type: ignore[attr-defined]
    return [m for m in module.modules() if hasattr(m, "_is_expert_parallel")]


def noted(used: set[int]) -> Any:
    def note(_: object, given: tuple[torch.Tensor, ...], named: dict[str, torch.Tensor]) -> None:
        index = named["top_k_index"] if "top_k_index" in named else given[1]
        used.update(torch.unique(index).tolist())

    return note


def spoil(memory: np.ndarray[Any, Any], packed: PackedTensor, expert: int) -> None:
    each = packed.n_bytes // packed.shape[0]
    start = memory.ctypes.data + packed.offset + expert * each
    ctypes.memset(start, NOT_A_NUMBER, each)


def test_what_kernels_do_not_find_on_the_host_is_not_read_there(tmp_path: Path) -> None:
    llama(tmp_path)
    served = HostServed(tmp_path, attention=PlainAttention)
    assert isinstance(served.model, GpuExecutor)
    served.model._pointers = None
    served.read((1,))
    with pytest.raises(BrokenPromise, match="do not find its weights"):
        served.logits(job([1, 2]))
    served.close()
