"""Fused models whose matrices a library multiplies: all, some, from some number of rows on.

On any CPU a stand-in takes panels, in both dtypes; oneDNN itself where this CPU lets it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ballast.core.job import SequenceWork
from ballast.kernels import choices, contest, linear, onednn
from ballast.kernels.choice_file import ChoiceFile
from ballast.memory.tensor import tensor_at
from ballast.models.fused.library import Library
from ballast.models.fused.model import FusedModel
from tests.models.fused.test_fused import checkpoint, close, expected, tokens_of
from tests.models.tiny import GREEDY, Served

SHAPES = {
    (128, 64): "qkv",
    (64, 64): "o",
    (320, 64): "gate_up",
    (64, 150): "down",
    (331, 64): "head",
    (256, 64): "qkv",  # wider heads, of "qwen3"
    (64, 128): "o",
}
"""Roles by the shapes of `test_fused.FAMILIES`, as stored."""
ROLES = ["qkv", "o", "gate_up", "down", "head"]
ALWAYS = dict.fromkeys(ROLES, 1)
TABLE = [8, 3, 11, 1, 6, 0, 2]


class Panels:
    """Stands in for a tensor of oneDNN's."""

    layout = "panels"

    def __init__(self, address: int, n: int, k: int, dtype: torch.dtype) -> None:
        self.n, self.k = n, k
        self.packed = tensor_at(address, linear.packed_shape(n, k, dtype), dtype)


class Calls:
    """Which matrices the stand-in has multiplied since `taken`."""

    def __init__(self) -> None:
        self.roles: list[str] = []

    def multiply(self, x: torch.Tensor, matrix: Panels, bias: torch.Tensor | None) -> torch.Tensor:
        assert x.dtype == matrix.packed.dtype
        self.roles.append(SHAPES[matrix.n, matrix.k])
        weight = linear.unpack(matrix.packed, matrix.n, matrix.k)
        return torch.nn.functional.linear(x, weight, bias)

    def taken(self) -> list[str]:
        roles, self.roles = self.roles, []
        return roles


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls()
    descriptor = onednn.Descriptor(b"", 0, True)
    monkeypatch.setattr(onednn, "describe", lambda n, k, dtype: descriptor)
    monkeypatch.setattr(onednn, "view", lambda at, n, k, dtype, _: Panels(at, n, k, dtype))
    monkeypatch.setattr(onednn, "multiply", made.multiply)
    return made


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Serves a checkpoint, the library from given numbers of rows on, by role."""
    opened: list[Served] = []

    def make(from_rows: dict[str, int], **settings: Any) -> Served:
        def chosen(
            n: int, k: int, dtype: torch.dtype, *, gated: bool = False, invariant: bool = False
        ) -> int:
            assert gated == (SHAPES[n, k] == "gate_up")
            return from_rows.get(SHAPES[n, k], choices.NEVER)

        monkeypatch.setattr(choices, "from_rows", chosen)
        opened.append(Served(tmp_path, model_impl="fused", linear="packed", **settings))
        assert isinstance(opened[-1].model, FusedModel)
        return opened[-1]

    yield make
    for served in opened:
        served.close()


def work(tokens: torch.Tensor, start: int, end: int) -> SequenceWork:
    return SequenceWork("a", tokens[start:end].tolist(), start, TABLE, GREEDY)


@pytest.mark.parametrize("family", ["llama", "llama tied", "llama biases, scaled", "qwen3"])
@pytest.mark.parametrize(
    "roles", [ROLES, ["gate_up"], ["qkv", "down"], ["o", "head"]], ids="-".join
)
def test_logits_are_those_of_transformers(
    tmp_path: Path, serve: Any, calls: Calls, family: str, roles: list[str]
) -> None:
    reference = checkpoint(tmp_path, family)
    served = serve(dict.fromkeys(roles, 1))
    tokens = tokens_of(50)
    logits = expected(reference, tokens)
    for start, end in ((0, 5), (5, 40), (40, 41), (41, 50)):
        close(served.logits(work(tokens, start, end)), logits[end - 1 : end])
        layer = [r for r in ROLES[:4] if r in roles]
        assert calls.taken() == layer * 3 + ["head"] * ("head" in roles)


def test_each_matrix_has_its_own_number_of_rows(tmp_path: Path, serve: Any, calls: Calls) -> None:
    reference = checkpoint(tmp_path, "llama")
    served = serve({"qkv": 4, "gate_up": 8, "head": 2})
    tokens = tokens_of(30)
    logits = expected(reference, tokens)
    for (start, end), roles in (
        ((0, 3), []),
        ((3, 7), ["qkv"]),
        ((7, 8), []),
        ((8, 16), ["qkv", "gate_up"]),
    ):
        close(served.logits(work(tokens, start, end)), logits[end - 1 : end])
        assert calls.taken() == roles * 3, "of the head there is one row"
    two = [work(tokens, 16, 17), SequenceWork("b", tokens[:1].tolist(), 0, [20], GREEDY)]
    found = served.logits(*two)
    close(found, torch.stack([logits[16], logits[0]]))
    assert calls.taken() == ["head"]


def test_a_chunk_that_samples_nothing_leaves_out_what_nobody_reads(
    tmp_path: Path, serve: Any, calls: Calls
) -> None:
    reference = checkpoint(tmp_path, "llama")
    served = serve(ALWAYS)
    tokens = tokens_of(20)
    served.logits(SequenceWork("a", tokens[:19].tolist(), 0, TABLE, None))
    assert calls.taken() == ROLES[:4] * 2 + ["qkv"]
    close(served.logits(work(tokens, 19, 20)), expected(reference, tokens)[19:])
    calls.taken()
    hidden = served.model.hidden([work(tokens, 19, 20)])
    assert hidden.shape == (1, 64)
    assert calls.taken() == ROLES[:4] * 3


def test_bfloat16_is_as_near_to_float32_as_our_kernels_are(
    tmp_path: Path, serve: Any, calls: Calls
) -> None:
    reference = checkpoint(tmp_path, "llama", torch.bfloat16).float()
    tokens = tokens_of(60)
    logits = expected(reference, tokens)[-1:]
    errors = []
    for from_rows in ({}, ALWAYS, {"gate_up": 1, "o": 1}):
        served = serve(from_rows, dtype="bfloat16")
        found = served.logits(work(tokens, 0, 60))
        assert bool(calls.taken()) == bool(from_rows)
        errors.append(float((found - logits).abs().mean() / logits.std()))
    assert max(errors[1:]) < 2 * errors[0] + 0.02


def test_the_layers_of_a_pass_are_waited_for(tmp_path: Path, serve: Any, calls: Calls) -> None:
    reference = checkpoint(tmp_path, "llama")
    served = serve({"qkv": 1, "down": 1})

    class Turning:
        def __init__(self) -> None:
            self.met: list[object] = []

        def places(self, work: object) -> None:
            return None

        def begin_pass(self, work: object) -> tuple[int, ...]:
            return 0, 2

        def wait(self, layer: int) -> None:
            self.met.append((layer, "wait", len(calls.roles)))

        def used(self, layer: int) -> None:
            self.met.append((layer, "used", len(calls.roles)))

        def stalled(self) -> float:
            return 0.0

    barriers = served.model.barriers = Turning()
    tokens = tokens_of(9)
    close(served.logits(work(tokens, 0, 9)), expected(reference, tokens)[8:])
    assert barriers.met == [(0, "wait", 0), (0, "used", 2), (2, "wait", 4), (2, "used", 6)]


def test_our_kernels_alone_where_nothing_is_chosen(tmp_path: Path, serve: Any) -> None:
    checkpoint(tmp_path, "llama")
    served = serve({})
    assert served.model._library is None


def test_onednn_itself(tmp_path: Path, serve: Any) -> None:
    """All matrices in float32 by oneDNN, from one row on."""
    reference = checkpoint(tmp_path, "llama")
    described = [onednn.describe(n, k, torch.float32) for n, k in SHAPES]
    if not all(d is not None and d.panels for d in described):
        pytest.skip("oneDNN does not pack float32 in our panels on this CPU")
    served = serve(ALWAYS)
    assert isinstance(served.model._library, Library)
    assert served.model._library.roles(1, 1) == frozenset(ALWAYS)
    tokens = tokens_of(40)
    logits = expected(reference, tokens)
    for start, end in ((0, 35), (35, 36), (36, 40)):
        close(served.logits(work(tokens, start, end)), logits[end - 1 : end])


def test_loading_a_model_measures_its_matrices_and_keeps_the_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real kernels, given times: oneDNN is the faster one from 128 rows on, but for gate and up."""
    reference = checkpoint(tmp_path, "llama")
    shapes = [shape for shape, role in list(SHAPES.items())[:5] if role != "gate_up"]
    described = [onednn.describe(n, k, torch.float32) for n, k in [*shapes, (320, 64)]]
    if not all(d is not None and d.panels for d in described):
        pytest.skip("oneDNN does not pack float32 in our panels on this CPU")
    measured = []

    def timer(call: contest.Call) -> float:
        call()
        sides = call.__self__  # type: ignore[attr-defined]
        measured.append(sides)
        gated = sides.out.shape[1] == 160
        return 100.0 if call == sides.ours else 150.0 if sides.rows < 128 or gated else 50.0

    file = ChoiceFile(tmp_path / "choices.json")
    made = choices.Choices(file, timer)
    monkeypatch.setattr(choices, "_choices", lambda: made)
    served = Served(tmp_path, model_impl="fused", linear="packed")
    again = Served(tmp_path, model_impl="fused", linear="packed")
    n_calls = len(measured)
    for model in (served.model, again.model):
        assert isinstance(model, FusedModel)
        library = model._library
        assert library is not None
        assert library.roles(127, 127) == frozenset()
        assert library.roles(128, 1) == {"qkv", "o", "down"}
        assert library.roles(128, 128) == {"qkv", "o", "down", "head"}
    (kept,) = file.here()
    assert {name: choice.from_rows for name, choice in kept.choices.items()} == {
        **{f"float32 {n}x{k}": 128 for n, k in shapes},
        "float32 320x64 gated": None,
    }
    tokens = tokens_of(140)
    table = list(range(10))
    found = served.logits(SequenceWork("a", tokens.tolist(), 0, table, GREEDY))
    close(found, expected(reference, tokens)[-1:])
    assert len(measured) == n_calls > 0, "measured when it was loaded, and only then"
    served.close()
    again.close()
