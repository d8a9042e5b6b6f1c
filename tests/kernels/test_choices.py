"""Which kernel is chosen, on any CPU: times are given, and nothing is measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ballast.kernels import choices, contest, onednn
from ballast.kernels.choice_file import ChoiceFile, KernelChoice
from ballast.kernels.choices import MARGIN, ROWS, UNMEASURED, Choices, decide
from ballast.kernels.contest import MatrixShape

BF16 = MatrixShape(128, 64, torch.bfloat16)
FLOAT32 = MatrixShape(128, 64, torch.float32, gated=True)
_RATIOS = st.dictionaries(
    st.sampled_from(ROWS[torch.bfloat16]), st.floats(0.01, 100.0), min_size=1, max_size=9
)


@pytest.mark.parametrize(
    ("ratios", "chosen"),
    [
        ({2: 3.0, 4: 1.5, 8: 0.8, 16: 0.6, 32: 0.5}, 8),
        ({2: 0.5, 4: 0.5, 8: 0.5}, 2),
        ({2: 3.0, 4: 1.5, 8: 1.2}, None),
        ({64: 0.7, 128: 1.6, 256: 1.6}, None),  # it loses where jobs are large
        ({64: 1.4, 128: 0.5, 256: 0.5}, 128),
        ({8: 0.5, 16: 1.1, 32: 0.5}, 8),  # one that was disturbed
        ({8: 0.5, 16: 90.0, 32: 0.4}, 32),
        ({8: 0.97, 16: 0.98}, None),  # as good as equal
        ({}, None),
    ],
)
def test_the_number_of_rows_with_the_least_time(
    ratios: dict[int, float], chosen: int | None
) -> None:
    assert decide(ratios) == chosen


def test_rows_in_bfloat16_are_invariant_by_default_where_that_costs_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where both kernels have the same instructions; tiles are faster by far."""
    for dots, tiles, by_default in (
        (True, False, True),
        (True, True, False),
        (False, False, False),
    ):
        monkeypatch.setattr(choices, "DOTS", dots)
        monkeypatch.setattr(onednn, "has_tiles", lambda tiles=tiles: tiles)
        assert choices.is_invariant(None) is by_default
        assert choices.is_invariant(True)
        assert not choices.is_invariant(False)


@pytest.mark.usefixtures("panels")
def test_an_invariant_row_is_never_onednns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "_choices", lambda: Choices(None))
    for dtype, invariant in ((torch.bfloat16, choices.NEVER), (torch.float32, 64)):
        assert choices.from_rows(128, 64, dtype) == UNMEASURED[dtype]
        assert choices.from_rows(128, 64, dtype, invariant=True) == invariant


@given(_RATIOS)
def test_what_was_slower_everywhere_is_never_used(ratios: dict[int, float]) -> None:
    chosen = decide(ratios)
    if all(r * MARGIN > 1 for r in ratios.values()):
        assert chosen is None
    if all(r * MARGIN < 0.999 for r in ratios.values()):
        assert chosen == min(ratios)
    assert chosen is None or ratios[chosen] * MARGIN < 1 + 1e-9, "it begins where it is faster"


@pytest.fixture
def panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU whose oneDNN takes our panels, of either dtype."""
    descriptor = onednn.Descriptor(b"", 0, True)
    monkeypatch.setattr(onednn, "describe", lambda n, k, dtype: descriptor)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[MatrixShape]:
    """Contests that were held: oneDNN wins all of them from 32 rows, or 128, on."""
    held: list[MatrixShape] = []

    def ratios(shape: MatrixShape, rows: tuple[int, ...], timer: object) -> dict[int, float]:
        held.append(shape)
        start = 32 if shape.dtype == torch.bfloat16 else 128
        return {n: 0.5 if n >= start else 2.0 for n in rows}

    monkeypatch.setattr(contest, "ratios", ratios)
    return held


@pytest.mark.usefixtures("panels")
def test_a_shape_is_measured_once_and_kept_for_later_processes(
    tmp_path: Path, measured: list[MatrixShape]
) -> None:
    path = tmp_path / "deep" / "choices.json"
    first = Choices(ChoiceFile(path))
    assert [first.from_rows(s) for s in (BF16, FLOAT32, BF16)] == [32, 128, 32]
    assert measured == [BF16, FLOAT32]
    later = Choices(ChoiceFile(path))
    assert [later.from_rows(s) for s in (BF16, FLOAT32)] == [32, 128]
    assert measured == [BF16, FLOAT32]
    plain = MatrixShape(FLOAT32.n, FLOAT32.k, FLOAT32.dtype)
    later.from_rows(plain)
    assert measured[2:] == [plain], "gated or not is not the same"


@pytest.mark.usefixtures("panels")
def test_a_choice_holds_as_long_as_the_process(tmp_path: Path, measured: list[MatrixShape]) -> None:
    path = tmp_path / "choices.json"
    made = Choices(ChoiceFile(path))
    assert made.from_rows(BF16) == 32
    path.write_text(path.read_text().replace('"from_rows": 32', '"from_rows": 4'))
    assert made.from_rows(BF16) == 32
    assert Choices(ChoiceFile(path)).from_rows(BF16) == 4
    path.unlink()
    assert made.from_rows(BF16) == 32
    assert measured == [BF16]


@pytest.mark.usefixtures("panels")
def test_what_another_process_has_kept_meanwhile_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "choices.json"

    def ratios(shape: MatrixShape, rows: tuple[int, ...], timer: object) -> dict[int, float]:
        ChoiceFile(path).keep(choices.name_of(shape), KernelChoice(from_rows=16, ratios={}))
        return dict.fromkeys(rows, 2.0)

    monkeypatch.setattr(contest, "ratios", ratios)
    assert Choices(ChoiceFile(path)).from_rows(BF16) == 16


@pytest.mark.usefixtures("panels")
def test_a_number_that_would_change_tokens_is_measured_anew(
    tmp_path: Path, measured: list[MatrixShape]
) -> None:
    """Float32 below 64 rows does not depend on the rows around it, whatever a file says."""
    path = tmp_path / "choices.json"
    ChoiceFile(path).keep(choices.name_of(FLOAT32), KernelChoice(from_rows=2, ratios={}))
    assert Choices(ChoiceFile(path)).from_rows(FLOAT32) == 128
    kept = ChoiceFile(path).find(choices.name_of(FLOAT32))
    assert kept is not None
    assert kept.from_rows == 128


@pytest.mark.usefixtures("panels")
def test_a_process_measures_for_a_limited_time(
    tmp_path: Path, measured: list[MatrixShape], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = MatrixShape(256, 64, torch.bfloat16)
    monkeypatch.setattr(choices, "MOST_SECONDS", 0.0)
    assert Choices(ChoiceFile(tmp_path / "c.json")).from_rows(BF16) == UNMEASURED[BF16.dtype]
    assert measured == []
    monkeypatch.setattr(choices, "MOST_SECONDS", 1e-9)
    made = Choices(ChoiceFile(tmp_path / "c.json"))
    made.from_rows(BF16)
    assert made.from_rows(other) == UNMEASURED[other.dtype]
    assert measured == [BF16]


@pytest.mark.usefixtures("panels")
def test_without_a_file_nothing_is_measured(measured: list[MatrixShape]) -> None:
    made = Choices(None)
    for shape in (BF16, FLOAT32):
        assert made.from_rows(shape) == UNMEASURED[shape.dtype]
    assert measured == []


@pytest.mark.usefixtures("panels")
def test_a_busy_machine_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "choices.json"
    monkeypatch.setattr(contest, "ratios", lambda shape, rows, timer: {rows[0]: 0.5})
    assert Choices(ChoiceFile(path)).from_rows(BF16) == UNMEASURED[torch.bfloat16]
    assert not path.exists()


@pytest.mark.usefixtures("panels")
def test_a_library_that_fails_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ratios(shape: MatrixShape, rows: tuple[int, ...], timer: object) -> dict[int, float]:
        raise RuntimeError("could not create a primitive")

    path = tmp_path / "choices.json"
    monkeypatch.setattr(contest, "ratios", ratios)
    assert Choices(ChoiceFile(path)).from_rows(BF16) is None
    assert not path.exists()


@pytest.mark.parametrize(
    "descriptor", [None, onednn.Descriptor(b"", 0, False)], ids=["no packing", "another layout"]
)
def test_where_bytes_do_not_serve_both_there_is_nothing_to_choose(
    tmp_path: Path,
    measured: list[MatrixShape],
    monkeypatch: pytest.MonkeyPatch,
    descriptor: onednn.Descriptor | None,
) -> None:
    monkeypatch.setattr(onednn, "describe", lambda n, k, dtype: descriptor)
    assert Choices(ChoiceFile(tmp_path / "c.json")).from_rows(BF16) is None
    assert measured == []


def test_every_default_may_be_chosen() -> None:
    assert all(UNMEASURED[dtype] in rows for dtype, rows in ROWS.items())
    assert min(ROWS[torch.float32]) == 64
    assert min(ROWS[torch.bfloat16]) > 1


def _needs_panels(shape: MatrixShape) -> None:
    described = onednn.describe(shape.n, shape.k, shape.dtype)
    if described is None or not described.panels:
        pytest.skip(f"oneDNN has no such panels of {shape.dtype} on this CPU")


def by(ours: Callable[[int], float], theirs: Callable[[int], float]) -> contest.Timer:
    """A timer: the call is made, and takes what was given for its rows."""

    def timer(call: contest.Call) -> float:
        call()
        sides = call.__self__  # type: ignore[attr-defined]
        of = ours if call == sides.ours else theirs
        return of(sides.rows)

    return timer


@pytest.mark.parametrize("dtype", list(ROWS))
@pytest.mark.parametrize("gated", [False, True])
def test_a_real_contest_by_given_times(tmp_path: Path, dtype: torch.dtype, gated: bool) -> None:
    """Both kernels run, where this CPU has both; the numbers decide."""
    shape = MatrixShape(256, 96, dtype, gated)
    _needs_panels(shape)
    timer = by(lambda rows: rows, lambda rows: 100 + rows / 2)
    found = contest.ratios(shape, ROWS[dtype], timer)
    assert found == {n: (100 + n / 2) / n for n in ROWS[dtype]}
    assert Choices(ChoiceFile(tmp_path / "c.json"), timer).from_rows(shape) == 256


def test_times_that_never_repeat_are_left_out() -> None:
    shape = MatrixShape(64, 32, torch.float32)
    _needs_panels(shape)
    times = {"n": 0}

    def timer(call: contest.Call) -> float:
        call()
        times["n"] += 1
        return float(2.0 ** -times["n"])

    assert contest.ratios(shape, (64, 128), timer) == {}
    few = times["n"]
    assert few % 4 == 0
    assert few >= 4 * 5


@pytest.mark.parametrize("dtype", list(ROWS))
@pytest.mark.parametrize("gated", [False, True])
def test_both_sides_of_a_contest_compute_the_same(dtype: torch.dtype, gated: bool) -> None:
    shape = MatrixShape(256, 96, dtype, gated)
    _needs_panels(shape)
    found: dict[str, torch.Tensor] = {}

    def timer(call: contest.Call) -> float:
        sides = call.__self__  # type: ignore[attr-defined]
        sides.out.fill_(math.nan)
        call()
        found["ours" if call == sides.ours else "theirs"] = sides.out.clone()
        return 1.0

    contest.ratios(shape, (64,), timer)
    assert found["ours"].std() > 0.01
    error = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(found["ours"], found["theirs"], rtol=error, atol=error)
