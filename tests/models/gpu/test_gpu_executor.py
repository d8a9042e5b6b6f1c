"""The generic path of a GPU against `generate`, on CPU tensors and on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ballast.core.errors import BrokenPromise
from ballast.core.job import SequenceWork
from ballast.core.model import uniform_kv
from ballast.core.settings import AdapterSettings, ModelSettings
from ballast.kernels.plain.attention import PlainAttention
from ballast.kv.layout import Layout
from ballast.memory.tensor import tensor_at
from ballast.models.gpu.executor import GpuTransformersModel
from ballast.models.gpu.fused import GpuFusedModel
from ballast.weights.checkpoint import load_host_model
from benchmarks.adapters import random_adapter
from benchmarks.families import config, make
from tests.models.tiny import GREEDY, Served, llama


def device_model(served: Served) -> GpuTransformersModel:
    assert isinstance(served.model, GpuTransformersModel)
    return served.model


class OnGpu(Served):
    """Served from plain tensors of the first GPU."""

    def __init__(
        self, path: Path, impl: str = "generic", blocks: int = 128, **settings: Any
    ) -> None:
        said = {"model_impl": impl, "linear": "plain", **settings}
        asked = ModelSettings(name=path.name, path=str(path), **said)
        self.host = load_host_model(asked)
        self.host.spec = self.spec = uniform_kv(self.host.spec)
        self.layout = Layout.of(self.spec, 65536)
        device = torch.device("cuda", 0)
        sizes = self.spec.segment_bytes
        self.segments = [torch.zeros(n, dtype=torch.uint8, device=device) for n in sizes]
        n_bytes = self.layout.pages(blocks) * self.layout.page_bytes
        self.blocks = torch.full((n_bytes,), 0xFF, dtype=torch.uint8, device=device)
        addresses = [segment.data_ptr() for segment in self.segments]
        where = (self.host, addresses, self.blocks.data_ptr(), self.layout, n_bytes, device)
        self.model = (GpuFusedModel if self.host.fused else GpuTransformersModel)(*where)
        for segment, address in zip(self.segments, self.host.addresses, strict=True):
            segment.copy_(tensor_at(address, (len(segment),), torch.uint8))


def generated(reference: Any, prompts: list[list[int]], n: int) -> list[list[int]]:
    expected = []
    for prompt in prompts:
        out = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=n,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        expected.append(out[0, len(prompt) :].tolist())
    return expected


def prompts_of(*sizes: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 331, (n,), generator=generator).tolist() for n in sizes]


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "gpt_neox", "gpt_oss"])
def test_generates_what_the_reference_generates(family: str, tmp_path: Path) -> None:
    reference = make(tmp_path, config(family))
    prompts = prompts_of(5, 40, 23)
    expected = generated(reference, prompts, 12)
    served = Served(tmp_path, attention=PlainAttention)
    assert served.generate(prompts, 12, chunk=7) == expected
    served.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU")
@pytest.mark.parametrize(
    ("family", "impl"),
    [
        *((f, "generic") for f in ("llama", "gemma2", "qwen3_moe", "gpt_oss")),
        *((f, "fused") for f in ("llama", "mistral", "qwen2", "qwen3")),
    ],
)
def test_generates_on_a_gpu_what_the_reference_generates(
    family: str, impl: str, tmp_path: Path
) -> None:
    reference = make(tmp_path, config(family))
    prompts = prompts_of(5, 300, 23)
    served = OnGpu(tmp_path, impl)
    expected = generated(reference, prompts, 40)
    assert served.generate(prompts, 40, chunk=100) == expected
    if isinstance(served.model, GpuFusedModel):
        served.model._one_row = not served.model._one_row
        assert served.generate(prompts[:1], 40) == expected[:1]
    served.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU")
@pytest.mark.parametrize("impl", ["generic", "fused"])
def test_adapters_on_a_gpu_add_what_they_add_on_a_cpu(impl: str, tmp_path: Path) -> None:
    base = llama(tmp_path / "base", tie_word_embeddings=False)
    random_adapter(base, tmp_path / "x", 1, rank=8)
    random_adapter(base, tmp_path / "y", 2, rank=3, only=("q_proj", "down_proj", "lm_head"))
    adapters = tuple(AdapterSettings(name=n, path=str(tmp_path / n)) for n in ("x", "y"))
    ours = OnGpu(tmp_path / "base", impl, adapters=adapters)
    theirs = Served(tmp_path / "base", adapters=adapters)
    prompts, tables = prompts_of(5, 70, 23, 9), [[0], list(range(1, 6)), [6, 7], [8]]
    for start in (0, -1):  # prefills, then decodes of their last tokens
        work = []
        for i, (prompt, table) in enumerate(zip(prompts, tables, strict=True)):
            first = start % len(prompt)
            adapter = [0, 1, None, 1][i]
            work.append(SequenceWork(str(i), prompt[first:], first, table, GREEDY, adapter))
        torch.testing.assert_close(
            ours.logits(*work).cpu(), theirs.logits(*work), rtol=0, atol=1e-3
        )
    ours.close()
    theirs.close()


def test_logits_are_those_of_the_cpu_and_only_what_is_wanted(tmp_path: Path) -> None:
    llama(tmp_path)
    ours, theirs = Served(tmp_path, attention=PlainAttention), Served(tmp_path)
    tokens = torch.randint(3, 331, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    jobs = [
        [SequenceWork("a", tokens[:30], 0, [4, 7], None)],
        [
            SequenceWork("a", tokens[30:], 30, [4, 7, 1, 9], GREEDY),
            SequenceWork("b", tokens[:9], 0, [2], GREEDY),
        ],
        [SequenceWork("b", [5], 9, [2], GREEDY), SequenceWork("a", [8], 60, [4, 7, 1, 9], None)],
    ]
    for job in jobs:
        found, expected = ours.logits(*job), theirs.logits(*job)
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    embedded = [SequenceWork("c", tokens[:11], 0, [30], None, embed=True)]
    torch.testing.assert_close(
        ours.model.hidden(embedded), theirs.model.hidden(embedded), rtol=0, atol=1e-4
    )
    ours.close()
    theirs.close()


def test_jobs_of_one_bucket_have_one_place(tmp_path: Path) -> None:
    llama(tmp_path)
    served = Served(tmp_path, attention=PlainAttention)
    model = device_model(served)
    decode = [SequenceWork("a", [3], 5, [0], GREEDY), SequenceWork("b", [4], 3, [1], GREEDY)]
    first = model.batch(decode)
    assert first.bucket.decodes
    addresses = (first.tokens.data_ptr(), first.out.data_ptr())
    other = model.batch([SequenceWork("c", [9] * 70, 0, list(range(5)), GREEDY)])
    assert other is not first
    again = model.batch([SequenceWork("b", [7], 4, [1], GREEDY), *decode[:1]])
    assert again is first
    assert addresses == (again.tokens.data_ptr(), again.out.data_ptr())
    assert again.tokens.tolist() == [7, 3]
    served.close()


def test_chunks_of_many_sizes_do_not_pile_up(tmp_path: Path) -> None:
    llama(tmp_path)
    served = Served(tmp_path, attention=PlainAttention)
    model = device_model(served)
    for n in range(20, 300, 20):
        model.batch([SequenceWork("a", [1] * n, 0, list(range(20)), None)])
    assert len(model._chunks) <= 8
    served.close()


def test_what_is_pinned_for_its_batches_is_freed_when_it_is_closed(tmp_path: Path) -> None:
    """Also of those that it has dropped, and that the garbage collector may find much later: by
    then the streams that PyTorch records an event on may be gone, which ends the process."""
    llama(tmp_path)
    served = Served(tmp_path, attention=PlainAttention)
    model = device_model(served)
    jobs = [[SequenceWork("a", [1] * n, 0, list(range(32)), None)] for n in range(10, 510, 20)]
    jobs.append([SequenceWork("a", [3], 5, [0], GREEDY)])
    batches = {id(batch): batch for batch in map(model.batch, jobs)}
    assert len(batches) > len(model._chunks) + len(model._kept), "some have been dropped"
    assert all(batch._staged._stages for batch in batches.values())
    model.close()
    assert not any(batch._staged._stages for batch in batches.values())
    served.close()


def test_refuses_what_it_cannot_serve(tmp_path: Path) -> None:
    llama(tmp_path)
    served = Served(tmp_path, attention=PlainAttention)
    with pytest.raises(BrokenPromise, match="512"):
        served.logits(SequenceWork("a", [1, 2], 511, list(range(33)), GREEDY))
    served.close()


def test_products_of_float32_are_of_float32(tmp_path: Path) -> None:
    llama(tmp_path)
    torch.set_float32_matmul_precision("high")
    Served(tmp_path, attention=PlainAttention).close()
    assert torch.get_float32_matmul_precision() == "highest"
