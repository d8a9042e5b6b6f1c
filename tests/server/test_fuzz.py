"""Thousands of requests that are wrong in some way: an answer to each, and no harm done.

`make check` sends ten thousand. `BALLAST_FUZZ_SEED` makes others; a failure shows the seed and the
requests.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed

from tests.cluster.fake_device import BREAK, DIE, HOLD, PAUSE, REFUSE, SILENT, STUCK, TELL
from tests.effort import LONG
from tests.server.fuzzing import Hit, Marksman, broken, fire
from tests.server.process import DEADLINE, ServerProcess, server, until

SEED = int(os.environ.get("BALLAST_FUZZ_SEED", "1"))
MODELS = ["atlas-chat", "wren-mini"]
BODIES, STRAYS, REAL = (9_000, 1_000, 250) if LONG else (2_500, 500, 100)
"""Requests: to routes that take a body, anywhere, and of the first kind to real models."""
BY_SCHEMA = {True: 20, False: 6} if LONG else {True: 8, False: 4}
"""Requests for each operation that takes a body, or takes none."""
LONGEST = 2
"""Most items of a list that is made by a schema without a bound."""
HOOKS = (HOLD, DIE, REFUSE, BREAK, TELL, SILENT, PAUSE, STUCK)
"""Seeds by which a fake device is told to misbehave: not what is tested here."""
ADMIN = {"authorization": "Bearer sk-admin-of-the-tests"}
CHAT: dict[str, Any] = {
    "model": MODELS[1],
    "messages": [{"role": "user", "content": "What floats?"}],
    "max_tokens": 4,
    "max_completion_tokens": None,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 3,
    "n": 2,
    "stop": ["x"],
    "stop_token_ids": [7],
    "stream": True,
    "stream_options": {"include_usage": True},
    "logprobs": None,
    "top_logprobs": None,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1},
    "min_tokens": 1,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "response_format": {"type": "text"},
    "structured_outputs": None,
    "tools": None,
    "tool_choice": None,
    "parallel_tool_calls": None,
    "chat_template_kwargs": None,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "priority": 0,
    "user": "u",
}
SAMPLED = {
    name: CHAT[name]
    for name in ("model", "temperature", "top_p", "top_k", "seed", "stop_token_ids", "stream")
}
MESSAGES: dict[str, Any] = {
    **SAMPLED,
    "messages": [{"role": "user", "content": [{"type": "text", "text": "What floats?"}]}],
    "system": "Be brief.",
    "max_tokens": 4,
    "stop_sequences": ["x"],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto"},
    "output_config": {"effort": "low"},
}
RESPONSES: dict[str, Any] = {
    **SAMPLED,
    "input": [{"role": "user", "content": "What floats?"}],
    "instructions": "Be brief.",
    "max_output_tokens": 4,
    "text": {"format": {"type": "text"}},
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "tool_choice": "auto",
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "metadata": {"k": "v"},
    "store": False,
    "previous_response_id": None,
}
SIMULATION: dict[str, Any] = {
    "devices": "2xH100-80G",
    "presets": "balloon",
    "workload": "poisson",
    "rate": 1.0,
    "seconds": 60.0,
    "seed": 1,
}
LEVELS: dict[str, Any] = {
    "slo": {"ttft": 1.0, "tpot": 0.1},
    "priority": 1,
    "share": 2.0,
    "limits": {"waiting": 1000},
    "pinned": False,
}
SOUND: dict[str, dict[str, Any]] = {
    "POST /v1/chat/completions": CHAT,
    "POST /v1/completions": {**CHAT, "model": MODELS[0], "prompt": "A ship", "echo": False},
    "POST /v1/messages": MESSAGES,
    "POST /v1/messages/count_tokens": MESSAGES,
    "POST /v1/responses": RESPONSES,
    "POST /v1/embeddings": {"model": MODELS[1], "input": "A ship", "encoding_format": "float"},
    "POST /v1/rerank": {
        "model": MODELS[1],
        "query": "A ship",
        "documents": ["b", "c"],
        "top_n": 1,
        "return_documents": True,
    },
    "POST /v1/score": {"model": MODELS[1], "text_1": "A ship", "text_2": ["b", "c"]},
    "POST /api/chat": {
        "model": MODELS[0],
        "messages": [{"role": "user", "content": "Hello"}],
        "options": {"num_predict": 3, "temperature": 0.5, "top_k": 4, "stop": ["x"]},
        "stream": False,
        "keep_alive": "5m",
    },
    "POST /api/generate": {
        "model": MODELS[0],
        "prompt": "A ship",
        "system": "Be brief.",
        "options": {"num_predict": 3, "repeat_penalty": 1.1, "seed": 1},
        "format": "json",
    },
    "POST /api/embed": {"model": MODELS[1], "input": ["A ship", "b"], "truncate": True},
    "POST /api/embeddings": {"model": MODELS[1], "prompt": "A ship"},
    "POST /api/show": {"model": MODELS[0]},
    "POST /api/pull": {"model": MODELS[0], "stream": False},
    "POST /tokenize": {"model": MODELS[0], "prompt": "A ship", "add_special_tokens": True},
    "POST /detokenize": {"model": MODELS[0], "tokens": [40, 41]},
}


@pytest.fixture(scope="module")
def own(echo_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Of this module: what it does to a server is not for others to suffer."""
    directory = tmp_path_factory.mktemp("fuzz")
    shutil.copytree(echo_file.parent, directory, dirs_exist_ok=True)
    file = directory / echo_file.name
    file.write_text(file.read_text().rstrip() + "\nserver:\n  admin_key: sk-admin-of-the-tests\n")
    with server(file, "--echo") as running:
        yield running


def check_unharmed(running: ServerProcess, worker: int, **headers: str) -> None:
    """The same worker, all memory back, and an ordinary request is served."""
    assert running.worker_pid == worker
    assert "Traceback" not in running.output
    assert running.http.get("/health").json()["status"] == "ok"
    answer = running.client.completions.create(model=MODELS[0], prompt="abc", max_tokens=3)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3

    def settled() -> bool:
        # Numbers of a report are read one after the other: they add up when nothing goes on.
        state = running.http.get("/admin/state", headers=headers).json()
        reports = [m["report"] for m in state["models"]]
        held = sum(state["owners"].values())
        return held + state["free"] + state["reclaiming"] == state["total"] and all(
            r["running"] == r["waiting"] == 0 and r["kv_pages"] == r["cached_pages"]
            for r in reports
        )

    until(settled)


def check_answered(hits: list[Hit], running: ServerProcess) -> None:
    wrong = broken(hits)
    said = "\n\n".join([*wrong[:5], *running.lines[-20:]])
    assert not wrong, f"{len(wrong)}, by seed {SEED}:\n{said}"


def keep_small(schema: Any, named: dict[str, Any]) -> None:
    """No list in it, or in what it refers to, is long where it says nothing of lengths: lists are
    in lists, and to make up what is in them takes most of the time."""
    if isinstance(schema, list):
        for part in schema:
            keep_small(part, named)
    if isinstance(schema, dict):
        if schema.get("type") == "array" and "maxItems" not in schema:
            schema["maxItems"] = max(LONGEST, schema.get("minItems", 0))
        for part in schema.values():
            keep_small(part, named)
        name = schema.get("$ref", "").rpartition("/")[2]
        if name in named:
            keep_small(named.pop(name), named)


def test_the_document_tells_the_truth(own: ServerProcess) -> None:
    """What schemathesis makes of `/openapi.json` is answered as it says there."""
    import schemathesis  # takes half a second
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    worker = own.worker_pid
    document = own.http.get("/openapi.json", headers=ADMIN).json()
    for schema in document["components"]["schemas"].values():
        if schema["title"].endswith("Request"):
            schema["properties"]["model"] = {"enum": MODELS}  # to get past the first check
            keep_small(schema, dict(document["components"]["schemas"]))
    statuses: Counter[tuple[str, int]] = Counter()
    with requests.Session() as session:
        session.trust_env = False
        for found in schemathesis.openapi.from_dict(document).get_all_operations():
            operation = found.ok()
            modes = [GenerationMode.POSITIVE]
            if operation.body or operation.query:
                modes.append(GenerationMode.NEGATIVE)
            for mode in modes:

                def answered(case: Any) -> None:
                    if isinstance(case.body, dict) and case.body.get("seed") in HOOKS:
                        return
                    response = case.call(own.base, session, dict(ADMIN), timeout=DEADLINE)
                    statuses[case.path, response.status_code] += 1
                    case.validate_response(
                        response,
                        checks=[
                            not_a_server_error,
                            status_code_conformance,
                            content_type_conformance,
                            response_schema_conformance,
                        ],
                    )

                quiet = settings(
                    max_examples=BY_SCHEMA[bool(operation.body)] // 2,
                    database=None,
                    deadline=None,
                    print_blob=True,
                    suppress_health_check=list(HealthCheck),
                    phases=[Phase.generate],
                )
                test = hypothesis_seed(SEED)(
                    quiet(given(case=operation.as_strategy(mode))(answered))
                )
                test()
    accepted = [route for route in SOUND if statuses[route.partition(" ")[2], 200]]
    assert len(accepted) > len(SOUND) // 2, statuses
    check_unharmed(own, worker, **ADMIN)


def test_odd_requests_are_answered_and_none_hurts(own: ServerProcess) -> None:
    worker = own.worker_pid
    paths = own.http.get("/openapi.json", headers=ADMIN).json()["paths"]
    bodies = {
        **SOUND,
        "POST /admin/models": {"name": "scratch", "path": MODELS[0], "pinned": False},
        f"PATCH /admin/models/{MODELS[1]}": LEVELS,
        "PATCH /admin/kv": {"host": "1MiB"},
        "POST /admin/memory/release": {"devices": ["cpu:0"], "keep": "1MiB"},
        "POST /v1/load_lora_adapter": {"lora_name": "lora", "lora_path": "/none"},
        "POST /v1/unload_lora_adapter": {"lora_name": "lora"},
        "POST /admin/devices/cpu:0/lend": {"to": "cpu:1", "memory": "1MiB"},
        "POST /admin/devices/cpu:0/recall": {"to": "cpu:1", "memory": "1MiB", "seconds": 1.0},
        "POST /admin/devices/cpu:0/release": {"to": "cpu:1"},
        "POST /admin/simulate": SIMULATION,
        "POST /admin/plan": {**SIMULATION, "devices": "H100-80G", "target": 0.9},
    }
    takes_body = {
        f"{method.upper()} {path}".replace("devices/{name}", "devices/cpu:0").replace(
            "{name}", MODELS[1]
        )
        for path, ways in paths.items()
        for method, way in ways.items()
        if "requestBody" in way
    }
    assert takes_body == set(bodies), "a route that takes a body is not tried"
    marksman = Marksman(bodies, SEED, ADMIN)
    shots = [*marksman.shots(BODIES), *marksman.strays(STRAYS)]
    hits = fire(own.http.base_url, shots)
    check_answered(hits, own)
    assert len(hits) == BODIES + STRAYS
    accepted = Counter(f"{h.shot.method} {h.shot.path}" for h in hits if h.status < 300)
    # There is nobody to lend to, no adapter and no tier.
    alone = {r for r in bodies if "/devices/" in r or "lora" in r or r.endswith("/kv")}
    assert all(accepted[route] for route in bodies.keys() - alone), accepted
    check_unharmed(own, worker, **ADMIN)


def test_hundreds_of_them_before_real_models(real: ServerProcess) -> None:
    worker = real.worker_pid
    bounds = {"max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 2, "n": 1}
    marksman = Marksman(SOUND, SEED + 1, **bounds)
    hits = fire(real.http.base_url, marksman.shots(REAL))
    check_answered(hits, real)
    assert Counter(h.status for h in hits)[200] > REAL // 10
    check_unharmed(real, worker)
