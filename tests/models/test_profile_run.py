"""The profile run: what is set aside for jobs is what they need, on this machine and on others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.autograd import profiler

from ballast.core.cost import activation_bytes
from ballast.core.errors import DeviceError, UnsupportedModel
from ballast.core.job import SequenceWork
from ballast.core.request import Sampling
from ballast.core.settings import AdapterSettings, DeviceSettings, ModelSettings
from ballast.core.units import MiB, ceil_div
from ballast.models import profile_run
from ballast.models.executor import ModelExecutor
from ballast.models.fused.workspace import workspace_bytes
from ballast.models.on_cpu import on_cpu
from ballast.models.profile_run import measured
from ballast.weights.checkpoint import load_host_model
from ballast.weights.host import HostModel
from benchmarks.adapters import random_adapter
from benchmarks.families import config, make
from tests.models.tiny import Served, llama

CASES = {
    # hidden, intermediate, heads, kv heads, vocabulary, step tokens, step logits
    "usual": (256, 688, 8, 4, 4096, 256, 64),
    "mostly logits": (128, 344, 4, 4, 32000, 128, 64),
    "mostly MLP": (64, 2048, 4, 1, 331, 384, 16),
    "mostly attention": (128, 64, 32, 8, 331, 384, 16),
    "wide": (512, 512, 8, 8, 331, 256, 1),
}


def peak_bytes(run: Callable[[], object]) -> int:
    """Most bytes that PyTorch had allocated at once during `run`, by its other profiler."""
    with profiler.profile(use_cpu=True, use_kineto=True, profile_memory=True) as profiled:
        run()
    now = peak = 0
    results = profiled.kineto_results
    assert results is not None
    for event in results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def of_steps(tokens: int, logits: int) -> DeviceSettings:
    return DeviceSettings(budget_bytes=64 * MiB, step_tokens=tokens, step_logits=logits)


def largest_job(tokens: int, logits: int) -> list[SequenceWork]:
    """Decodes and a prefill chunk, sampled in the way that takes most."""
    rest = tokens - logits + 1
    sampling = Sampling(temperature=0.7, top_p=0.9, logprobs=0)
    work = [SequenceWork(str(i), [1], 0, [i], sampling) for i in range(logits - 1)]
    # Different tokens, so that they go to different experts.
    tail = [2 + i % 300 for i in range(rest)]
    blocks = list(range(logits - 1, logits + ceil_div(rest, 16)))
    work.append(SequenceWork("long", tail, 0, blocks, sampling))
    return work


def needed_and_bound(
    path: Path, dtype: str, tokens: int, logits: int, impl: str = "generic", linear: str = "plain"
) -> tuple[int, int]:
    """(bytes that a largest job took at its peak, what is set aside for it); checks the estimate
    that stands in where nothing is measured, too."""
    served = Served(
        path, blocks=logits + ceil_div(tokens, 16), dtype=dtype, model_impl=impl, linear=linear
    )
    estimate = activation_bytes(served.spec, tokens, logits)
    spec = measured(served.host, on_cpu, of_steps(tokens, logits)).spec
    job = [replace(w, blocks=served.table(w.blocks)) for w in largest_job(tokens, logits)]
    served.model.run(job[-1:])
    needed = peak_bytes(lambda: served.model.run(job))
    if served.host.fused:
        needed += workspace_bytes(served.spec, tokens, logits)
    served.close()
    assert needed <= estimate
    return needed, activation_bytes(spec, tokens, logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.replace(" ", "-"))
def test_a_largest_job_takes_at_least_half_of_its_bound(
    case: str, dtype: str, tmp_path: Path
) -> None:
    hidden, intermediate, heads, kv_heads, vocab, tokens, logits = CASES[case]
    llama(
        tmp_path,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=32,
        vocab_size=vocab,
        num_hidden_layers=2,
    )
    for impl in ("generic", "fused"):
        for linear in ("plain", "packed"):
            needed, bound = needed_and_bound(tmp_path, dtype, tokens, logits, impl, linear)
            assert needed > MiB
            assert needed <= bound <= 2 * needed


_WIDE = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
FAMILIES: dict[str, dict[str, int]] = {
    "qwen3_moe": {**_WIDE, "moe_intermediate_size": 640, "num_experts": 8},
    "mixtral": {**_WIDE, "intermediate_size": 1024},
    "glm4_moe": {**_WIDE, "hidden_size": 512, "moe_intermediate_size": 64},
    "phi3": {**_WIDE, "intermediate_size": 2048},
    "gpt2": {"n_embd": 128, "n_head": 4, "n_inner": 1024},
    "gemma2": {**_WIDE, "intermediate_size": 2048},
    "gpt_neox": {"hidden_size": 256, "num_attention_heads": 8, "intermediate_size": 2048},
}
"""Several experts at once, gate and up in one matrix, activations written in Python."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_do_so_too(family: str, dtype: str, tmp_path: Path) -> None:
    make(tmp_path, config(family, **FAMILIES[family]))
    needed, bound = needed_and_bound(tmp_path, dtype, 128, 16)
    assert needed > MiB
    assert needed <= bound <= 2 * needed


@pytest.mark.parametrize("copies", [0, 1, 12])
def test_whatever_a_library_needs_for_itself_is_measured(
    copies: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between CPUs with and without instructions for a dtype: float32 copies of operands."""
    plain = torch.nn.functional.linear

    def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        scratch = torch.empty(copies, x.numel() + x.numel() // x.shape[-1] * len(w))
        result = plain(x, w, b)
        del scratch
        return result

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    make(tmp_path, config("gpt_neox", **FAMILIES["gpt_neox"]))
    host = load_host_model(ModelSettings(name="m", path=str(tmp_path), linear="plain"))
    spec = measured(host, on_cpu, of_steps(128, 16)).spec
    host.close()
    served = Served(tmp_path)
    job = largest_job(128, 16)
    needed = peak_bytes(lambda: served.model.run(job))
    served.close()
    assert needed <= activation_bytes(spec, 128, 16) <= 2 * needed
    copy = 4 * 128 * (256 + 2048)
    assert (needed > copies * copy) if copies else (needed < 4 * copy)


@pytest.fixture
def loaded(tmp_path: Path) -> Iterator[Callable[..., HostModel]]:
    """Loads small models of a family, and closes them."""
    hosts: list[HostModel] = []

    def load(family: str, **settings: str) -> HostModel:
        path = tmp_path / family
        make(path, config(family))
        hosts.append(load_host_model(ModelSettings(name=family, path=str(path), **settings)))  # type: ignore[arg-type]
        return hosts[-1]

    yield load
    for host in hosts:
        host.close()


@pytest.mark.parametrize("family", ["glm4_moe", "gemma2", "opt"])
def test_its_first_layers_stand_for_all(
    family: str, loaded: Callable[..., HostModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = loaded(family)
    few = measured(host, on_cpu, of_steps(64, 8)).spec.job_memory
    layers: list[int] = []

    def counted(host: HostModel, *rest: object) -> ModelExecutor:
        layers.append(host.spec.n_layers)
        return on_cpu(host, *rest)  # type: ignore[arg-type]

    measured(host, counted, of_steps(64, 8))
    assert layers[0] < host.spec.n_layers
    monkeypatch.setattr(profile_run, "_shallow", lambda host: host)
    assert measured(host, counted, of_steps(64, 8)).spec.job_memory == few
    assert layers[1] == host.spec.n_layers


def test_two_runs_measure_the_same(loaded: Callable[..., HostModel]) -> None:
    host = loaded("llama")
    once = measured(host, on_cpu, of_steps(64, 8)).spec.job_memory
    assert once is not None
    assert measured(host, on_cpu, of_steps(64, 8)).spec.job_memory == once
    # A smaller job needs no more; of a larger one nothing is known.
    assert activation_bytes(host.spec, 8, 8) == once.n_bytes
    unmeasured = replace(host.spec, job_memory=None)
    assert activation_bytes(host.spec, 65, 8) == activation_bytes(unmeasured, 65, 8)


def test_its_threads_are_the_devices_and_the_callers_are_as_before(
    loaded: Callable[..., HostModel],
) -> None:
    before = torch.get_num_threads()
    seen = []

    def make_seeing(*given: object) -> ModelExecutor:
        seen.append(torch.get_num_threads())
        return on_cpu(*given)  # type: ignore[arg-type]

    measured(loaded("llama"), make_seeing, replace(of_steps(8, 4), threads=before + 1))
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


def test_rows_that_go_through_adapters_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "base"
    model = llama(path, hidden_size=128, intermediate_size=1024)
    adapters = (
        random_adapter(model, tmp_path / "all", 1, rank=8),
        random_adapter(model, tmp_path / "few", 2, rank=64, only=("q_proj",)),
    )
    named = tuple(AdapterSettings(name=a.path.name, path=str(a.path)) for a in adapters)
    for impl in ("generic", "fused"):
        served = Served(path, model_impl=impl, linear="packed", adapters=named)
        spec = measured(served.host, on_cpu, of_steps(128, 16)).spec
        assert not served.host.failed
        job = [replace(w, adapter=i % 2) for i, w in enumerate(largest_job(128, 16))]
        needed = peak_bytes(lambda served=served, job=job: served.model.run(job))  # type: ignore[misc]
        if served.host.fused:
            needed += workspace_bytes(spec, 128, 16)
        served.close()
        assert needed > MiB
        assert needed <= activation_bytes(spec, 128, 16) <= 2 * needed


def test_a_model_whose_jobs_fail_is_refused_and_closed(loaded: Callable[..., HostModel]) -> None:
    host = loaded("llama", model_impl="generic")

    def broken(*given: object) -> ModelExecutor:
        executor = on_cpu(*given)  # type: ignore[arg-type]
        executor.logits = _burn  # type: ignore[method-assign]
        return executor

    with pytest.raises(UnsupportedModel, match=r"llama: a job of it fails: .* on fire"):
        measured(host, broken, of_steps(8, 4))
    with pytest.raises(DeviceError, match="closed"):
        host.memory.addresses()


def _burn(work: object) -> torch.Tensor:
    raise RuntimeError("the kernel is on fire")


def test_the_estimate_grows_with_the_job() -> None:
    from tests.policy.worlds import model

    spec = model("m").spec
    small = activation_bytes(spec, 1, 1)
    assert 0 < small <= activation_bytes(spec, 64, 1) <= activation_bytes(spec, 64, 64)
    assert torch.iinfo(torch.int64).max > activation_bytes(spec, 1 << 20, 1 << 10)
