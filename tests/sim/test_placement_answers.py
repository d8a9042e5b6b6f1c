"""`ballast place`: problems and answers in JSON, and what is said of faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ballast.cli import app
from ballast.core.errors import ConfigError
from ballast.sim.placement_answers import problems_of

CLI = CliRunner()


def model(name: str, **changes: Any) -> dict[str, Any]:
    plain = {"name": name, "weights_gb": 13.5, "token_rate": 500, "tpot_slo": 0.1, "device": None}
    return {**plain, **changes}


def problem(*models: dict[str, Any], n: int = 2, gb: float = 72.0) -> dict[str, Any]:
    devices = [{"name": f"g{i}", "memory_gb": gb} for i in range(n)]
    return {"devices": devices, "models": list(models)}


def placed(outcome: object, tmp_path: Path, *options: str) -> Any:
    file = tmp_path / "problem.json"
    file.write_text(json.dumps(outcome))
    result = CLI.invoke(app, ["place", str(file), *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_problem_has_an_answer_with_every_model(tmp_path: Path) -> None:
    outcome = problem(model("a", device="g1"), model("b", weights_gb=130, tp=2), model("c"), n=4)
    found = placed(outcome, tmp_path)
    assert list(found["placement"]) == ["a", "b", "c"]
    assert len(found["placement"]["b"]) >= 2
    assert {d for ds in found["placement"].values() for d in ds} <= {"g0", "g1", "g2", "g3"}
    assert found["seconds"] >= 0
    assert found["algorithm"] == "muxserve"
    assert set(found["moved"]) == (set() if found["placement"]["a"] == ["g1"] else {"a"})
    assert found["tokens_per_second"] >= found["tokens_per_second_before_local_search"] - 1e-6
    for m in found["models"].values():
        assert 0 < m["tokens_per_second"] <= m["asked_tokens_per_second"] * (1 + 1e-9)
    again = placed(outcome, tmp_path)
    assert {**found, "seconds": 0} == {**again, "seconds": 0}


def test_a_list_has_a_list_of_answers(tmp_path: Path) -> None:
    found = placed([problem(model("a")), problem(model("b"))], tmp_path, "--algorithm", "muxserve")
    assert [list(f["placement"]) for f in found] == [["a"], ["b"]]


def test_a_problem_may_come_from_stdin() -> None:
    outcome = json.dumps(problem(model("a")))
    result = CLI.invoke(app, ["place", "-"], input=outcome, catch_exceptions=False)
    assert json.loads(result.stdout)["placement"].keys() == {"a"}


def test_hosts_bound_how_far_a_model_is_spread(tmp_path: Path) -> None:
    outcome = problem(model("large", weights_gb=100), n=4)
    assert len(placed(outcome, tmp_path)["placement"]["large"]) >= 2
    with pytest.raises(ConfigError, match=r"large.* are missing"):
        placed(outcome, tmp_path, "--per-host", "1")


@pytest.mark.parametrize(
    ("outcome", "options", "match"),
    [
        (problem(model("huge", weights_gb=500)), (), r"'huge'.* are missing"),
        (problem(model("a", tpot_slo=0)), (), r"models\[0\]\.tpot_slo"),
        (problem(model("a", weights_gb=-1)), (), r"models\[0\]\.weights_gb"),
        (problem(model("a", wieghts=1)), (), "wieghts"),
        (problem(model("a"), model("a")), (), "names that differ"),
        (problem(model("a", device="g9")), (), "device of a.*g0, g1"),
        ({"devices": [], "models": []}, (), "devices"),
        ([problem(model("a")), {"models": []}], (), r"problems\[1\]"),
        (problem(model("a")), ("--algorithm", "greediest"), "use one of muxserve, greedy, optimal"),
        (
            problem(model("huge", weights_gb=500)),
            ("--algorithm", "greedy"),
            r"'huge'.* are missing",
        ),
        (problem(model("a", tp=3)), ("--algorithm", "optimal"), "tp of a"),
        (problem(model("a")), ("--device", "A1000"), "A1000"),
    ],
)
def test_faults_are_named(
    outcome: object, options: tuple[str, ...], match: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=match):
        placed(outcome, tmp_path, *options)


def test_what_is_no_json_says_so() -> None:
    with pytest.raises(ConfigError, match="must be JSON"):
        problems_of("devices: []", "x")
    with pytest.raises(ConfigError, match="cannot be read"):
        CLI.invoke(app, ["place", "/nowhere/at/all"], catch_exceptions=False)


@pytest.mark.parametrize("algorithm", ["greedy", "optimal"])
def test_pressure_is_told_with_a_bound_and_the_moves(algorithm: str, tmp_path: Path) -> None:
    outcome = problem(
        model("a", token_rate=900, device="g0"),
        model("b", token_rate=300, device="g0"),
        model("c", token_rate=600, device="g0"),
        model("wide", weights_gb=40, tp=2, token_rate=0),
    )
    found = placed(outcome, tmp_path, "--algorithm", algorithm)
    assert list(found["placement"]) == ["a", "b", "c", "wide"]
    assert sorted(found["placement"]["wide"]) == ["g0", "g1"]
    assert found["algorithm"] == algorithm
    # Two of 13.5 GB and half of `wide`, or one: 900 / 0.1 over the rest of 72 GB.
    assert found["max_kvpr"] == pytest.approx(9000 / (72 - 27 - 20)) or found[
        "max_kvpr"
    ] == pytest.approx(9000 / (72 - 13.5 - 20))
    assert 0 < found["lower_bound"] <= found["max_kvpr"] * (1 + 1e-9)
    moved = {m["model"]: (m["from"], m["to"]) for m in found["moves"]}
    homes = found["placement"]
    assert moved == {m: (["g0"], homes[m]) for m in "abc" if homes[m] != ["g0"]}
    assert moved


def test_a_threshold_keeps_models_where_they_are(tmp_path: Path) -> None:
    outcome = problem(
        model("a", token_rate=500, device="g0"), model("b", token_rate=450, device="g0")
    )
    assert placed(outcome, tmp_path, "--algorithm", "greedy")["moves"]
    still = placed(outcome, tmp_path, "--algorithm", "greedy", "--threshold", "0.7")
    assert still["moves"] == []
