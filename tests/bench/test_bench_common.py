"""What benchmark scripts share."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks.common import (
    Samples,
    finish,
    flatten,
    interleave,
    machine,
    options,
    result_table,
    write_json,
)


def test_variants_take_turns_in_both_orders() -> None:
    order: list[str] = []

    def variant(name: str, value: float) -> float:
        order.append(name)
        return value

    taken = interleave(
        {"a": lambda: variant("a", 2.0), "b": lambda: variant("b", 1.0)}, rounds=3, warmup=1
    )
    assert "".join(order) == "abbaabba"
    assert taken["a"].values == (2.0, 2.0, 2.0)
    assert taken["a"].over(taken["b"]).median == 2.0
    with pytest.raises(ValueError, match="0 rounds"):
        interleave({}, 0)


def test_samples_tell_median_and_quartiles() -> None:
    assert Samples((3.0, 1.0, 2.0)).spread == (1.0, 3.0)
    result = Samples(tuple(float(n) for n in range(1, 8))).to_json()
    assert (result["median"], result["low"], result["high"]) == (4.0, 2.0, 6.0)
    drift = Samples((1.0, 2.0, 4.0)).over(Samples((2.0, 4.0, 8.0)))
    assert drift.spread == (0.5, 0.5)


def test_finish_writes_results_at_top_level(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep" / "r.json"
    args = options("A title.\n\nMore.", ["--json", str(path), "--quick"])
    finish(args, "thing", {"max_rate": {"static": np.float64(1.5)}, "ok": np.bool_(True)})
    result = json.loads(path.read_text())
    assert result["benchmark"] == "thing"
    assert result["quick"] is True
    assert result["max_rate"]["static"] == 1.5
    assert result["ok"] is True
    assert result["machine"]["cores"] >= 1
    assert {"day", "commit"} <= set(result)
    assert "max_rate.static" in capsys.readouterr().out


def test_each_result_that_docs_quote_says_when_where_and_on_what_code_it_was_taken() -> None:
    files = sorted((Path(__file__).parents[2] / "docs" / "results").glob("*.json"))
    assert files
    for file in files:
        result = json.loads(file.read_text())
        assert all(result.get(key) for key in ("day", "commit", "machine")), file.name


def test_options_take_more(capsys: pytest.CaptureFixture[str]) -> None:
    args = options("T", ["--rounds", "5"], lambda p: p.add_argument("--rounds", type=int))
    assert (args.rounds, args.json, args.quick) == (5, None, False)
    assert "torch" in capsys.readouterr().out


def test_json_refuses_what_is_no_number(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "x.json", {"a": float("nan")})
    with pytest.raises(TypeError, match="no place"):
        write_json(tmp_path / "x.json", {"a": object()})


def test_records_with_the_same_fields_are_rows_of_one_table() -> None:
    found = {
        "ok": True,
        "by": {"a": {"x": 1.5, "n": 2}, "b": {"x": 2.5, "n": [3, 4]}},
        "one": {"y": 7},
    }
    written = io.StringIO()
    Console(file=written, width=80).print(result_table("thing", found))
    shown = [line.strip("│ ").split() for line in written.getvalue().splitlines()]
    assert ["ok", "│", "True"] in shown
    assert ["one.y", "│", "7"] in shown
    assert ["by.a", "│", "1.5", "│", "2"] in shown
    assert ["by.b", "│", "2.5", "│", "3,", "4"] in shown


def test_flatten() -> None:
    assert flatten({"a": {"b": 1, "c": [2]}, "d": {}}) == {"a.b": 1, "a.c": [2]}


def test_machine_tells_what_results_depend_on_and_no_names() -> None:
    assert set(machine()) == {
        "cores", "memory_gib", "architecture", "isa", "python", "torch", "torch_threads", "gpu",
    }  # fmt: skip
