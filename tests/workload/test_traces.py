"""Every format, on rows made up here; and on the public files where BALLAST_TRACES names them."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from ballast.workload.prompts import prompt_for
from ballast.workload.servegen import ServeGenSample
from ballast.workload.traces import load_trace
from ballast.workload.workload import WorkloadError

ARENA = """req_id,model_dir,adapter_dir,prompt_len,output_len,req_time
0,base,tall,12,30,1.5
1,base,small,7,0,2.25
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2030-01-01 00:00:01.2500000,100,20
2030-01-01 00:00:03.7500000,50,10
"""
GENTD = """gmt_create,predict_type,predict_status,exec_time_seconds,groupId,prompt_length,\
negative_prompt_length,num_images_per_prompt,num_inference_steps,checkpoint_model_version_id,num_lora
2030-01-01 00:00:10,DRAW,DONE,3.0,u1,41.0,,1.0,20.0,cat,0
2030-01-01 00:00:40,DRAW,WAITS,0.0,u2,,,,,,0
2030-01-01 00:01:10,DRAW,DONE,3.0,u2,,,1.0,20.0,dog,0
"""
MOONCAKE = """{"timestamp": 500, "input_length": 700, "output_length": 3, "hash_ids": [0, 1]}
{"timestamp": 2000, "input_length": 600, "output_length": 4, "hash_ids": [0, 2]}
"""


BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,0,1087,API log
"""
BURSTGPT_SESSIONS = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,\
Total tokens,Log Type
100.0,0b1c-7f,43,GPT-4,906,446,1352,Conversation log
151.5,,2,ChatGPT,36,29,65,API log
"""


def bailian(chat: int, parent: int, at: float, tokens: int, blocks: Iterable[int]) -> str:
    row = {
        "chat_id": chat,
        "parent_chat_id": parent,
        "timestamp": at,
        "input_length": tokens,
        "output_length": 132,
        "type": "text",
        "turn": 1,
        "hash_ids": list(blocks),
    }
    return json.dumps(row) + "\n"


BAILIAN = (
    bailian(159, -1, 61.5, 37, [4, 5, 6])
    + bailian(160, -1, 62.0, 16, [9])
    + bailian(170, 159, 63.5, 64, [4, 5, 7, 8])
    + bailian(171, 170, 64.5, 65, [4, 5, 7, 8, 2**64 - 1])
    + bailian(180, 3, 65.0, 16, [9])
    + bailian(181, 3, 66.0, 16, [9])
)


def turn(t: float, blocks: Iterable[int], **more: Any) -> dict[str, Any]:
    ids = list(blocks)
    return {
        "t": t,
        "type": "n",
        "model": "m1",
        "in": len(ids) * 4 + 1,
        "out": 6,
        "hash_ids": ids,
    } | more


AGENTIC = "".join(
    json.dumps(session) + "\n"
    for session in (
        {
            "id": "s1",
            "block_size": 4,
            "requests": [
                turn(0.0, [1, 2]),
                {"t": 5.0, "type": "subagent", "requests": [turn(0.0, [8]), turn(7.0, [8, 9])]},
                turn(6.0, [1, 2, 3], model="m2"),
            ],
        },
        {"id": "s2", "block_size": 4, "requests": [turn(0.0, [1, 2])]},
    )
)
RATES_HEADER = "category,model,client_id,timestamp,rate,cv,pat_name,pat_arg1,pat_arg2\n"
RATES = (
    RATES_HEADER
    + "\n".join(
        f"language,{model},{client},{start},{rate},{cv},{pattern},{shape},1.0"
        for start in (0, 600, 1200)
        for model, client, rate, cv, pattern, shape in (
            ("big", 0, 2.0, 1.0, "Gamma", 0.5),
            ("big", 1, 1.0, 1.0, "Weibull", 0.6),
            ("small", 0, 1.0, 0, "", 0),
            ("idle", 0, 0, 0, "", 0),
        )
    )
    + "\n"
)
PDFS = "".join(
    json.dumps(
        {
            "category": "language",
            "model": model,
            "client_id": client,
            "window_start": start,
            "input_tokens": f"{{{n}: 0.25, {n + 2}: 0.75}}",
            "output_tokens": "{7: 1.0}",
        }
    )
    + "\n"
    for model, client, start, n in (
        ("big", 0, 86_400, 100),
        ("big", 0, 87_600, 500),
        ("small", "0", "86400", 10),
    )
)


def write(path: Path, text: str) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("suffix", ["csv", "csv.gz"])
def test_arena(tmp_path: Path, suffix: str) -> None:
    w = load_trace(write(tmp_path / f"some.{suffix}", ARENA))
    result = [(r.at, r.model, r.prompt_tokens, r.output_tokens) for r in w.requests]
    assert result == [(0.0, "tall", 12, 30), (0.75, "small", 7, 1)]
    assert w.name == "some"


def test_azure_takes_its_model_from_the_file_name(tmp_path: Path) -> None:
    w = load_trace(write(tmp_path / "azure_code.csv", AZURE))
    assert [(r.at, r.model) for r in w.requests] == [(0.0, "azure-code"), (2.5, "azure-code")]
    assert load_trace(write(tmp_path / "x.csv", AZURE)).models == ("azure",)


def test_gentd_says_what_it_made_up(tmp_path: Path) -> None:
    w = load_trace(write(tmp_path / "g.csv", GENTD))
    result = [(r.at, r.model, r.prompt_tokens, r.session) for r in w.requests]
    assert result == [(0.0, "cat", 10, "u1"), (60.0, "dog", 1, "u2")]
    assert "synthetic mix" in w.labels[0]
    assert w.labels[1] == "1 requests without a model left out"


def test_mooncake_shares_prefixes(tmp_path: Path) -> None:
    w = load_trace(write(tmp_path / "m.jsonl", MOONCAKE))
    assert [r.at for r in w.requests] == [0.0, 1.5]
    a, b = (prompt_for(r, 30_000) for r in w.requests)
    assert a[:512] == b[:512]
    assert a[512] != b[512]


def test_a_row_whose_blocks_do_not_fit_its_length_is_refused(tmp_path: Path) -> None:
    short = MOONCAKE.replace("[0, 2]", "[0]")
    with pytest.raises(WorkloadError, match=r"line 2: hash_ids: 1 blocks, but .*600 tokens are 2"):
        load_trace(write(tmp_path / "m.jsonl", short))
    # Bailian's rows, read as Mooncake's, once made five devices of one.
    for kind, other, text in (("mooncake", "bailian", BAILIAN), ("bailian", "mooncake", MOONCAKE)):
        text = text.replace('{"timestamp"', '{"chat_id": 1, "timestamp"')
        with pytest.raises(WorkloadError, match=rf"line 1: .* blocks of \d+ \({other}\)"):
            load_trace(write(tmp_path / "x.jsonl", text), kind=kind)
    for size, fits in ((4, True), (9, False), (2, False)):
        path = write(tmp_path / "a.jsonl", AGENTIC.replace('size": 4', f'size": {size}'))
        if fits:
            load_trace(path)
        else:
            with pytest.raises(WorkloadError, match="line 1: a turn of s1 at 0 s has 2 hash_ids"):
                load_trace(path)


def test_burstgpt(tmp_path: Path) -> None:
    w = load_trace(write(tmp_path / "b.csv", BURSTGPT))
    result = [(r.at, r.model, r.prompt_tokens, r.output_tokens, r.session) for r in w.requests]
    assert result == [(0.0, "ChatGPT", 472, 18, None), (40.0, "GPT-4", 1087, 1, None)]
    assert w.labels == ("1 requests recorded with 0 output tokens have 1",)
    named = load_trace(write(tmp_path / "s.csv.gz", BURSTGPT_SESSIONS), kind="burstgpt")
    assert [(r.at, r.session) for r in named.requests] == [(0.0, "0b1c-7f"), (51.5, None)]


def test_bailian_has_seconds_blocks_of_16_and_chats(tmp_path: Path) -> None:
    w = load_trace(write(tmp_path / "qwen_traceA.jsonl", BAILIAN))
    assert [r.at for r in w.requests] == [0.0, 0.5, 2.0, 3.0, 3.5, 4.5]
    a, b, c, d, _, e = (prompt_for(r, 30_000) for r in w.requests)
    assert a[:32] == c[:32]
    assert a[32:37] != c[32:37]
    assert c == d[:64]
    assert b == e
    sessions = [r.session for r in w.requests]
    assert sessions[0] == sessions[2] == sessions[3] != sessions[1]
    assert sessions[4] == sessions[5] not in sessions[:4], "turns whose first is not in the file"


def _quoted(text: str) -> str:
    header, rows = text.split("\n", 1)
    return ",".join(f'"{name}"' for name in header.split(",")) + "\n" + rows


@pytest.mark.parametrize(
    "text", [ARENA, AZURE, BURSTGPT, GENTD, MOONCAKE, BAILIAN, AGENTIC], ids=lambda t: t[:20]
)
def test_how_a_file_is_written_does_not_matter(tmp_path: Path, text: str) -> None:
    """Byte-order mark, line ends, blank lines, quoted headers and blanks behind commas."""
    plain = load_trace(write(tmp_path / "t.csv", text))
    variants = [
        text.rstrip("\n"),
        text.replace("\n", "\n\n"),
        "\n \n" + text + "\n\t\n",
        text.replace("\n", "\r\n"),
        text.replace("\n", "\r\n \r\n"),
    ]
    if not text.startswith("{"):
        variants += [_quoted(text), text.replace(",", ", "), text.replace("\n", " \n", 1)]
    for variant in variants:
        for mark in (b"", b"\xef\xbb\xbf"):
            (tmp_path / "t.csv").write_bytes(mark + variant.encode())
            assert load_trace(tmp_path / "t.csv").requests == plain.requests, (variant, mark)
            (tmp_path / "t.csv.gz").write_bytes(gzip.compress(mark + variant.encode()))
            assert load_trace(tmp_path / "t.csv.gz").requests == plain.requests, (variant, mark)


def test_servegen_is_read_by_the_same_reader(tmp_path: Path) -> None:
    sample = ServeGenSample(start=300, seconds=300, rate=2.0, seed=3)
    plain = load_trace(servegen_files(tmp_path), servegen=sample)
    for name, text in (("rates.csv.gz", _quoted(RATES)), ("length_pdfs.jsonl.gz", PDFS)):
        odd = "\ufeff" + text.replace("\n", "\r\n\r\n")
        (tmp_path / name).write_bytes(gzip.compress(odd.encode()))
    assert load_trace(tmp_path / "rates.csv.gz", servegen=sample) == plain


@pytest.mark.parametrize(
    ("zone", "hours"),
    [("", 0), ("Z", 0), ("z", 0), ("+00:00", 0), ("+08:00", 8), ("+0800", 8), ("+08", 8),
     ("-05:30", -5.5), (" UTC", 0), (" +08:00", 8)],
)  # fmt: skip
def test_times_of_any_zone(tmp_path: Path, zone: str, hours: float) -> None:
    fractions = ["", ",5", *(f".{'125' * 3}"[: n + 1] for n in range(1, 10))]
    times = [(s, f) for s in ("T", " ", "t") for f in fractions]
    rows = ["2024-05-12T00:00:00Z", *(f"2024-05-13{s}00:00:07{f}{zone}" for s, f in times)]
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f'"{r}",1,1\n' for r in rows)
    first, *rest = load_trace(write(tmp_path / "z.csv", text)).requests
    assert first.at == 0.0
    due = [24 * 3600 + 7 + float("0" + f.replace(",", ".")) - 3600 * hours for _, f in times]
    assert [r.at for r in rest] == pytest.approx(sorted(due), abs=2e-6)


def test_agentic_flattens_subagents_and_keeps_sessions_apart(tmp_path: Path) -> None:
    w = load_trace(write(tmp_path / "a.jsonl.gz", AGENTIC), session_gap=100.0)
    result = [(r.at, r.model, r.session) for r in w.requests]
    assert result == [
        (0.0, "m1", "s1"),
        (5.0, "m1", "s1"),
        (6.0, "m2", "s1"),
        (12.0, "m1", "s1"),
        (100.0, "m1", "s2"),
    ]
    prompts = [prompt_for(r, 30_000) for r in w.requests]
    assert prompts[0][:8] == prompts[2][:8]
    assert prompts[0][:8] != prompts[4][:8]
    with pytest.raises(WorkloadError, match="session_gap"):
        load_trace(tmp_path / "a.jsonl.gz", session_gap=-1)


def servegen_files(folder: Path) -> Path:
    write(folder / "length_pdfs.jsonl.gz", PDFS)
    return write(folder / "rates.csv.gz", RATES)


def test_servegen_draws_at_the_rate_asked_for(tmp_path: Path) -> None:
    path = servegen_files(tmp_path)
    sample = ServeGenSample(start=300, seconds=1200, rate=8.0, seed=3)
    w = load_trace(path, servegen=sample)
    assert len(w.requests) == 9600, "neither more nor fewer than were asked for"
    big = sum(r.model == "big" for r in w.requests) / len(w.requests)
    assert big == pytest.approx(0.75, abs=0.05)
    assert {r.prompt_tokens for r in w.requests if r.model == "small"} == {10, 12}
    # The lengths of a client change with the time of day (1,200 s here).
    known = [r for r in w.requests if r.session == "big/0"]
    assert {r.prompt_tokens for r in known if r.at < 900} == {100, 102}
    assert {r.prompt_tokens for r in known if r.at >= 900} == {500, 502}
    assert any("without lengths of their own" in label for label in w.labels)
    assert w == load_trace(path, servegen=sample)
    assert w != load_trace(path, servegen=ServeGenSample(start=300, seconds=1200, rate=8.0, seed=4))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("rate", "seconds"), [(0.1, 60), (2.5, 64), (40, 5)])
def test_servegen_draws_as_many_as_were_asked_for(
    tmp_path: Path, seed: int, rate: float, seconds: float
) -> None:
    """Bursts of these clients bring half or three times the rate in a minute."""
    bursts = RATES.replace(",0.5,", ",0.05,").replace(",0.6,", ",0.2,")
    path = servegen_files(tmp_path)
    (tmp_path / "rates.csv.gz").write_bytes(gzip.compress(bursts.encode()))
    w = load_trace(path, servegen=ServeGenSample(seconds=seconds, rate=rate, seed=seed))
    assert len(w.requests) == round(rate * seconds)
    assert all(0 <= r.at < seconds for r in w.requests)


def test_servegen_lines_of_images_are_left_out(tmp_path: Path) -> None:
    """They have lengths of their own kinds, and perhaps none of prompt and output."""
    path = servegen_files(tmp_path)
    before = load_trace(path, servegen=ServeGenSample(start=300, seconds=1200, rate=8.0, seed=3))
    image = '{"category": "multimodal", "model": "mm", "client_id": 0, "window_start": 0, '
    image += '"image_tokens": "{(1024,): 0.5, (256, 256): 0.5}", "output_tokens": "{9: 1.0}"}'
    write(tmp_path / "length_pdfs.jsonl.gz", f"{PDFS.rstrip()}\n{image}\n")
    w = load_trace(path, servegen=ServeGenSample(start=300, seconds=1200, rate=8.0, seed=3))
    assert w.requests == before.requests
    assert w.labels[:-1] == before.labels
    assert w.labels[-1] == "1 lines of lengths without prompt or output left out"


def test_servegen_as_recorded_for_one_model(tmp_path: Path) -> None:
    sample = ServeGenSample(seconds=1800, rate=None, models=("small",))
    w = load_trace(servegen_files(tmp_path), servegen=sample)
    assert w.models == ("small",)
    assert len(w.requests) == pytest.approx(1800, rel=0.1)


def test_servegen_needs_lengths_and_demand(tmp_path: Path) -> None:
    alone = write(tmp_path / "rates.csv", RATES)
    with pytest.raises(WorkloadError, match="0 files"):
        load_trace(alone)
    path = servegen_files(tmp_path)
    with pytest.raises(WorkloadError, match="no client sends"):
        load_trace(path, servegen=ServeGenSample(models=("idle",)))
    with pytest.raises(WorkloadError, match="no model huge: it has big, idle, small"):
        load_trace(path, servegen=ServeGenSample(models=("big", "huge")))
    with pytest.raises(WorkloadError, match="only token lengths"):
        load_trace(tmp_path / "length_pdfs.jsonl.gz")
    with pytest.raises(WorkloadError, match="rate"):
        ServeGenSample(rate=0)


@pytest.mark.parametrize(
    ("name", "text", "line", "result"),
    [
        ("a.csv", ARENA + "2,base,tall,x,1,3.0\n", 4, "prompt_len: 'x' is not a number"),
        ("a.csv", ARENA + "2,base,tall,1.5,1,3.0\n", 4, "whole number"),
        ("a.csv", ARENA + "2,base,tall,1,1,nan\n", 4, "finite"),
        ("a.csv", ARENA + "2,base\n", 4, "2 columns where the header has 6"),
        ("a.csv", AZURE + "yesterday,1,1\n", 4, "'yesterday' is not a time"),
        ("a.csv", AZURE + "2030-01-01 00:00:09,-4,1\n", 4, "not negative"),
        ("g.csv", GENTD.replace("41.0", "long"), 2, "prompt_length"),
        ("m.jsonl", MOONCAKE + '{"timestamp": 1}\n', 3, "input_length"),
        ("m.jsonl", MOONCAKE + "{\n", 3, "truncated"),
        ("m.jsonl", MOONCAKE.replace("600", "-600"), 2, "input_length"),
        ("a.jsonl", AGENTIC + '{"id": "s3", "block_size": 0, "requests": []}\n', 3, "block_size"),
        ("r.csv", RATES.replace("Weibull", "Pareto", 1), 3, "Pareto"),
        ("x.csv", "a,b\n1,2\n", 1, r"not a known trace format.*\(a, b\).*burstgpt: Timestamp"),
        ("x.jsonl", '\n\n{"a": 1}\n', 3, r"not a known trace format.*\(a\).*bailian: chat_id"),
        ("x.jsonl", '{"a": \n', 1, "truncated"),
        ("b.csv", BURSTGPT + "9,,1,1,2,API log\n", 4, "Model: empty"),
        ("b.csv", BURSTGPT + "soon,GPT-4,1,1,2,API log\n", 4, "Timestamp: 'soon'"),
        ("b.jsonl", BAILIAN + bailian(1, -1, 70.0, 17, [1]), 7, "1 blocks.*17 tokens are 2 blocks"),
        ("a.csv", AZURE + "2030-01-01 00:00:00 CET,1,1\n", 4, "CET.*with a zone"),
        ("x.csv", "", 1, "not a known trace format"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, name: str, text: str, line: int, result: str) -> None:
    path = write(tmp_path / name, text)
    with pytest.raises(WorkloadError, match=result) as caught:
        load_trace(path)
    assert (caught.value.file, caught.value.line) == (str(path), line)
    assert f"{path}, line {line}: " in str(caught.value)


def test_bad_length_distribution_is_named(tmp_path: Path) -> None:
    path = servegen_files(tmp_path)
    write(tmp_path / "length_pdfs.jsonl.gz", PDFS.replace("7: 1.0", "seven: 1.0", 1))
    with pytest.raises(WorkloadError, match="not a distribution") as caught:
        load_trace(path)
    assert caught.value.line == 1


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    packed = gzip.compress(ARENA.encode() * 50)
    (tmp_path / "cut.csv.gz").write_bytes(packed[: len(packed) // 2])
    for name in ("cut.csv.gz", "absent.csv"):
        with pytest.raises(WorkloadError, match="cannot be read"):
            load_trace(tmp_path / name)
    (tmp_path / "latin.csv").write_bytes(b"\xff\xfe" * 10)
    with pytest.raises(WorkloadError, match="cannot be read"):
        load_trace(tmp_path / "latin.csv")


def test_empty_trace_and_unknown_kind(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", ARENA.splitlines()[0] + "\n")
    with pytest.raises(WorkloadError, match="holds no requests"):
        load_trace(path)
    with pytest.raises(WorkloadError, match="kind: 'csv': one of arena"):
        load_trace(path, kind="csv")
    with pytest.raises(WorkloadError, match="column 'TIMESTAMP' is missing"):
        load_trace(write(tmp_path / "b.csv", ARENA), kind="azure")


PUBLIC: dict[str, dict[str, float]] = {
    # From the descriptions published with the files: requests, rate, CV, mean lengths, models.
    "arena27_vtc_prism_0-300s.csv.gz": {
        "requests": 713, "rate": 2.38, "cv": 1.16, "prompt": 143, "output": 239, "models": 22,
        "active": 0.73, "switches": 372, "active_10s": 0.37, "switches_10s": 2847,
    },
    "azure2023_code_until1845.csv.gz": {
        "requests": 5100, "rate": 3.10, "cv": 13.7, "prompt": 2052, "output": 27,
    },
    "azure2023_conv_until1845.csv.gz": {
        "requests": 9754, "rate": 5.56, "cv": 1.07, "prompt": 1238, "output": 221,
    },
    "mooncake_conversation_0-1770s.jsonl.gz": {
        "requests": 5606, "rate": 3.17, "prompt": 12935, "output": 346,
    },
    "mooncake_synthetic.jsonl.gz": {
        "requests": 3993, "rate": 3.91, "prompt": 15325, "output": 149,
    },
    "claudecode_agentic_open.jsonl.gz": {
        "requests": 13136, "prompt": 108736, "output": 426, "models": 6,
    },
    # 15 of the 15,630 rows name no model.
    "gentd26_lora_requests_20241115-20241201.csv.gz": {
        "requests": 15615, "rate": 0.0111, "cv": 11.6, "models": 77, "active": 0.011,
        "switches": 30,
    },
}  # fmt: skip


public = pytest.mark.skipif("BALLAST_TRACES" not in os.environ, reason="no BALLAST_TRACES")


@public
def test_public_servegen_can_be_drawn_from() -> None:
    path = Path(os.environ["BALLAST_TRACES"]) / (
        "servegen_client_rates_week1_plus_deepseek-r1.csv.gz"
    )
    w = load_trace(path, servegen=ServeGenSample(seconds=600, rate=10.0))
    assert set(w.models) == {"m-large", "m-mid", "m-small", "deepseek-r1"}
    assert len(w.requests) == 6000


@public
@pytest.mark.parametrize("name", PUBLIC)
def test_public_traces_have_their_published_statistics(name: str) -> None:
    s = load_trace(Path(os.environ["BALLAST_TRACES"]) / name).stats()
    seen = {
        "requests": s.requests,
        "models": s.models,
        "rate": s.rate,
        "cv": s.cv,
        "prompt": s.prompt.mean,
        "output": s.output.mean,
        "active": s.active.share,
        "switches": s.active.switches_per_hour,
        "active_10s": s.active_10s.share,
        "switches_10s": s.active_10s.switches_per_hour,
    }
    for key, value in PUBLIC[name].items():
        assert seen[key] == pytest.approx(value, rel=0.02), key
