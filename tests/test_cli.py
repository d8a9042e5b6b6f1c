"""The command line, as its users meet it: a process, its output and its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ballast import __version__
from ballast.bench.report import Report
from ballast.cli import app
from ballast.cli_common import writable
from ballast.core.errors import BallastError, ConfigError
from ballast.core.settings import Slo
from ballast.fleet.fleet_source import FleetSource
from ballast.fleet.make import make_fleet
from ballast.sim.profile import device_profile


def ballast(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ballast.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_help_names_the_commands_and_loads_nothing_heavy() -> None:
    shown = ballast("--help")
    assert shown.returncode == 0
    for command in ("doctor", "fleet", "ps", "--version"):
        assert command in shown.stdout
    code = "import sys, ballast.cli; print(sorted({'torch', 'numba', 'zmq'} & set(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.strip() == "[]"


def test_version() -> None:
    assert ballast("--version").stdout.strip() == __version__
    assert invoke("version") == invoke("--version")


def test_make_a_fleet_and_let_the_doctor_see_it(tmp_path: Path) -> None:
    arguments = ("fleet", "make", tmp_path, "--size", "tiny", "--steps", "0", "--models", "2")
    made = ballast(*arguments, "--budget", "32MiB")
    assert made.returncode == 0, made.stderr
    assert "atlas-chat" in made.stdout
    assert f"ballast serve {tmp_path}/fleet.yaml" in made.stdout
    found = invoke("init", tmp_path, "--file", tmp_path / "found.yaml")
    assert "2 models" in found
    assert "atlas-chat" in (tmp_path / "found.yaml").read_text()
    with pytest.raises(ConfigError, match="--force"):
        invoke("init", tmp_path, "--file", tmp_path / "found.yaml")
    # In this process, where what the commands load is loaded once.
    with pytest.raises(ConfigError, match="--force"):
        invoke(*arguments)

    assert "wren-mini" in invoke("doctor", tmp_path / "fleet.yaml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("preset: balon\nmodels: [{name: a, path: .}]\ndevices: [{budget: 1GB}]\n", "'balloon'"),
        ("models: []\n", "models"),
    ],
)
def test_a_fault_of_the_users_is_one_line_and_exit_2(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "fleet.yaml").write_text(text)
    shown = ballast("doctor", tmp_path / "fleet.yaml")
    assert shown.returncode == 2
    assert shown.stdout == ""
    (line,) = shown.stderr.splitlines()
    assert line.startswith("ballast: ")
    assert says in line


def test_an_unknown_option_is_exit_2() -> None:
    assert ballast("fleet", "make", "--wrong").returncode == 2


def test_a_measured_profile_drives_a_simulation(tmp_path: Path) -> None:
    """In this process, where what the commands load is loaded once."""
    file, report = tmp_path / "out" / "here.toml", tmp_path / "report.json"
    fleet = make_fleet(tmp_path, n_models=1, size="tiny", steps=0, budget="32MiB").file

    def ballast(*arguments: object) -> str:
        done = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
        assert done.exit_code == 0
        return done.output

    assert "atlas-chat" in ballast("profile", fleet, "--to", file, "--rounds", 1, "--device", "pi")
    profile = device_profile(file)
    assert profile.device == "pi"
    assert profile.costs("atlas-chat").prefill_seconds(128) > 0

    work = ("bench", fleet, "--seconds", 5, "--profile", file, "--json", report)
    work = (*work, "--preset", "balloon")
    pictures = ("--png", tmp_path / "out" / "a.png", "--html", tmp_path / "out" / "a.html")
    ballast(*work, "--virtual", "--story", tmp_path / "story", *pictures)
    assert pictures[1].read_bytes().startswith(b"\x89PNG")
    assert "1 model in 32MiB on cpu:0" in pictures[3].read_text()
    assert json.loads(report.read_text())[0]["total"]["failed"] == 0
    assert ballast("story", "replay", tmp_path / "story").endswith("the same\n")
    trace = tmp_path / "trace.csv"
    rows = "".join(f"one,{10 + n},4,{n}.0\n" for n in range(20))
    trace.write_text(f"adapter_dir,prompt_len,output_len,req_time\n{rows}")
    assert "5 requests" in ballast(*work, "--virtual", "--workload", trace, "--start", 10)
    assert "power law of 0.9" in ballast(*work, "--virtual", "--workload", trace, "--spread", 0.9)
    with pytest.raises(ConfigError, match="it goes with --virtual"):
        ballast(*work)


def test_what_serves_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(KNOWN)
    work = ("--rate", 1, "--seconds", 5, "--most-tokens", 64, "--json", tmp_path / "simulated.json")
    shown = invoke("simulate", file, "--devices", "H100-80G,L4@graphs", "--engine", "eager", *work)
    assert "H100-80G, engine eager: engines that launch every kernel from the host" in shown
    assert "L4, engine graphs: engines of today" in shown
    result = json.loads((tmp_path / "simulated.json").read_text())
    assert [kind["engine"] for kind in result["devices"]] == ["eager", "graphs"]


KNOWN = """
preset: static
models: [{name: chat, path: "catalogue:Llama-2-7b"}, {name: code, path: "catalogue:Llama-2-7b"}]
"""


def invoke(*arguments: object) -> str:
    done = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_simulate_compares_presets_on_devices_that_are_not_here(tmp_path: Path) -> None:
    fleet, out = tmp_path / "fleet.yaml", tmp_path / "out"
    fleet.write_text(KNOWN)
    work = ("--workload", "poisson", "--seconds", 10, "--most-tokens", 256)
    files = ("--json", out / "a.json", "--html", out / "a.html", "--story", out / "a.story")
    devices = ("--devices", "1xL4,L4")
    shown = invoke("simulate", fleet, *devices, *work, "--preset", "swap,balloon", *files)
    assert "in SLO, code" in shown
    result = json.loads((out / "a.json").read_text())
    assert [run["name"] for run in result["presets"]] == ["swap", "balloon"]
    assert list(result["presets"][0]["devices"]) == ["L4:0", "L4:1"]
    assert "fleet.yaml on 1xL4,L4" in (out / "a.html").read_text()
    stories = [out / f"a-{preset}.story" for preset in ("swap", "balloon")]
    for story in stories:
        assert invoke("story", "replay", story).count("the same\n") == 2
    assert "lanes busy" in invoke("story", "compare", *stories)

    shown = invoke("plan", fleet, "--devices", "L4", *work, "--json", out / "plan.json")
    result = json.loads((out / "plan.json").read_text())
    assert result["device"] == "L4"
    by_name = {preset["name"]: preset for preset in result["presets"]}
    assert list(by_name) == ["lru+round-robin", "recompute+round-robin", "static"]
    assert by_name["static"]["devices"] == 2
    assert 4 <= len(by_name["static"]["draws"]) <= result["seeds"] == 8
    assert "fewest devices" in shown
    assert "for a further draw they do with" in " ".join(shown.split())
    links = tmp_path / "links.toml"
    links.write_text('per_host = 2\n[host]\nto_device = "20GB/s"\nto_host = "20GB/s"\n')
    files = ("--links", links, "--seeds", 1, "--json", out / "one.json")
    shown = invoke("plan", fleet, "--devices", "L4", *work, *files)
    assert len(json.loads((out / "one.json").read_text())["presets"][0]["draws"]) == 1
    assert "another may need more" in " ".join(shown.split())


def test_bench_warns_where_others_disturbed_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "fleet.yaml").write_text(
        "models: [{name: a, path: .}]\ndevices: [{budget: 1MiB}]\n"
    )
    empty = Report.of((), {"a": Slo()}, 1.0, name="balloon")
    presets = []

    def live(fleet: object, work: object, names: list[str], *more: object) -> list[Report]:
        presets.extend(names)
        return [replace(empty, name=name) for name in names]

    monkeypatch.setattr("ballast.bench.run.compare_live", live)
    monkeypatch.setattr("ballast.bench.run.compare_virtual", lambda *given: [empty])
    monkeypatch.setattr("ballast.bench.run.replay_http", lambda *given, **more: empty)
    monkeypatch.setattr("ballast.bench.machine_load.disturbance", lambda others: "others were busy")
    shown = invoke("bench", tmp_path / "fleet.yaml", "--preset", "static,balloon")
    assert presets == ["static", "balloon"]
    assert shown.rstrip().endswith("others were busy")
    assert "others were busy" in invoke("bench", tmp_path / "fleet.yaml", "--virtual")
    for option in (("--virtual", "--profile", "L4"), ("--url", "http://127.0.0.1:9")):
        assert "busy" not in invoke("bench", tmp_path / "fleet.yaml", *option)  # measured elsewhere


def test_a_server_that_starts_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From before its imports until it serves."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "fleet.yaml").write_text(
        "models: [{name: a, path: .}]\ndevices: [{budget: 1MiB}]\n"
    )
    served = []

    def serve(source: FleetSource, host: str, port: int, **more: Any) -> int:
        more["ready"](port)
        served.append(more["reading"].fleet.described)
        return 0

    monkeypatch.setattr("ballast.cluster.logs.set_up_logs", lambda *given: None)
    monkeypatch.setattr("ballast.server.serve.serve", serve)
    with caplog.at_level("INFO", "ballast"):
        invoke("serve", tmp_path / "fleet.yaml", "--no-changes")
    assert served == ["1 model from 1MiB of cpu:0, ballast"]
    assert caplog.messages[0] == f"starting {served[0]}"


def test_a_server_writes_its_own_story(tmp_path: Path) -> None:
    arguments = ["bench", "fleet.yaml", "--url", "http://x", "--story", str(tmp_path / "story")]
    with pytest.raises(ConfigError, match="serve --story"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_a_model_that_fits_nowhere_is_one_line_with_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text('models: [{name: big, path: "catalogue:Qwen2.5-72b"}]')
    shown = ballast("simulate", tmp_path / "fleet.yaml", "--devices", "8xH100-80G,L4")
    assert shown.returncode == 2
    *_, line = shown.stderr.splitlines()  # after what a slow machine says of its progress
    assert "'big'" in line
    assert line.endswith("GiB are missing")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("simulate", "--devices", "4xH1000"), "'H1000': did you mean.* H100-80G, .*L4"),
        (("simulate", "--devices", "L4", "--engine", "eagre"), "'eagre': did you mean 'eager'"),
        (("plan", "--devices", "L4@graph"), "L4: engine: 'graph': did you mean 'graphs'"),
        (("simulate", "--devices", "L4", "--preset", "static,swop"), "did you mean 'swap'"),
        (("simulate", "--devices", "L4", "--workload", "trace.csv"), r"trace.csv, line 3: .*'1x'"),
        (("simulate", "--devices", "L4", "--workload", "none.csv"), "a trace file, or one of"),
        (("plan", "--devices", "4xL4"), "one kind without a number"),
        (("plan", "--devices", "L4", "--target", "99"), "target.*as in 0.99"),
        (("serve",), r"models\[0\].path: 'catalogue:Llama-2-7b'.*for simulations"),
    ],
)
def test_a_fault_in_what_is_to_be_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fleet.yaml").write_text(KNOWN + "devices: [{budget: 1GB}]\n")
    Path("trace.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.680590,374,44\n"
        "2023-11-16 18:15:50.995184,396,1x\n"
    )
    command, *options = arguments
    with pytest.raises(BallastError, match=says):
        invoke(command, "fleet.yaml", *options)


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_an_output_that_could_not_be_written_is_refused_before_the_run(
    tmp_path: Path, option: str
) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(KNOWN)
    wrong = (tmp_path, fleet / "out.json")
    for file in wrong:
        with pytest.raises(ConfigError, match="a file that can be written"):
            invoke("simulate", fleet, "--devices", "L4", option, file)


def test_a_port_or_seed_that_there_is_not_is_refused(tmp_path: Path) -> None:
    for wrong in (("--port", 99999), ("--port", -1)):
        refused = CliRunner().invoke(app, ["serve", "fleet.yaml", *map(str, wrong)])
        assert refused.exit_code == 2
    refused = CliRunner().invoke(app, ["simulate", "fleet.yaml", "--seed", "-1"])
    assert refused.exit_code == 2


def test_a_rate_is_refused_for_a_trace_of_one_moment(tmp_path: Path) -> None:
    fleet, trace = tmp_path / "fleet.yaml", tmp_path / "trace.jsonl"
    fleet.write_text(KNOWN)
    request = '{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [1]}\n'
    trace.write_text(2 * request)
    run = ("simulate", fleet, "--devices", "L4", "--workload", trace)
    with pytest.raises(ConfigError, match="all requests of the trace come at one moment"):
        invoke(*run, "--rate", 2)
    with pytest.raises(ConfigError, match="most tokens: 0"):
        invoke(*run, "--most-tokens", 0)


def test_a_pipe_as_output_is_not_tried(tmp_path: Path) -> None:
    """Opening it would wait for a reader, who would see it end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert writable(pipe) == pipe
