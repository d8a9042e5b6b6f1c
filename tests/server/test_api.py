"""The API through the official client, before a device that repeats the prompt."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.cluster.fake_device import BREAK, REFUSE
from tests.server.process import ServerProcess

MODEL = "atlas-chat"
TEXT = "The 猫 sat — on the 👩‍👩‍👧 mat.\n\nThen it left."


@pytest.fixture(scope="module")
def client(echo: ServerProcess) -> OpenAI:
    return echo.client


def tokens_of(client: OpenAI, text: str) -> int:
    return usage(client.completions.create(model=MODEL, prompt=text)).prompt_tokens


def usage(answer: Any) -> Any:
    assert answer.usage is not None
    return answer.usage


# -- answers ------------------------------------------------------------------------------------


def test_models_are_those_that_serve_and_others_are_described_by_name(
    client: OpenAI, echo: ServerProcess
) -> None:
    result = {m.id: m.to_dict() for m in client.models.list()}
    assert list(result) == [MODEL, "wren-mini"]
    assert result[MODEL]["status"] == {"value": "loaded"}
    assert result[MODEL]["max_model_len"] == 256
    assert client.models.retrieve(MODEL).to_dict() == result[MODEL]
    broken = client.models.retrieve("broken").to_dict()
    assert broken["status"] == {"value": "failed", "reason": "it is broken"}
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")
    echo.until_said("broken is not served", "mute is not served")
    health = echo.http.get("/health").json()
    assert set(health["failed"]) == {"broken", "mute"}
    assert (health["serving"], health["models"]) == (2, 4)


def test_completion(client: OpenAI) -> None:
    n = tokens_of(client, TEXT)
    answer = client.completions.create(model=MODEL, prompt=TEXT, max_tokens=n)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].finish_reason == "length"
    result = usage(answer)
    assert (result.prompt_tokens, result.completion_tokens, result.total_tokens) == (n, n, 2 * n)


def test_completion_defaults_to_sixteen_tokens(client: OpenAI) -> None:
    assert usage(client.completions.create(model=MODEL, prompt=TEXT)).completion_tokens == 16


def test_chat_defaults_to_the_rest_of_the_context(client: OpenAI) -> None:
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, extra_body={"ignore_eos": True}
    )
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    # The template's own tokens are special: they have no text.
    assert (answer.choices[0].message.content or "").startswith("Be brief.a\nb")
    assert usage(answer).total_tokens == 256


def test_prompts_of_token_ids_and_several_choices(client: OpenAI) -> None:
    prompt = [[40, 41, 42], [50, 51]]
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, n=2)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    texts = [c.text for c in answer.choices]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert (usage(answer).prompt_tokens, usage(answer).completion_tokens) == (5, 16)
    single = client.completions.create(model=MODEL, prompt=[40, 41, 42], max_tokens=4)
    assert single.choices[0].text == texts[0]


def test_long_prompts_are_tokenised_beside_the_event_loop(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="word " * 20_000)
    assert caught.value.code == "context_length_exceeded"


def test_log_probabilities_of_chosen_tokens(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="abc é", max_tokens=4, logprobs=0)
    result = answer.choices[0].logprobs
    assert result is not None
    assert result.token_logprobs == [-0.5] * 4
    assert result.tokens is not None
    assert result.text_offset is not None
    assert len(result.tokens) == len(result.text_offset) == 4
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "é"}], max_tokens=4, logprobs=True
    )
    content = chat.choices[0].logprobs
    assert content is not None
    assert content.content is not None
    assert b"".join(bytes(t.bytes or []) for t in content.content).startswith(b"<|user|>\xc3\xa9")


# -- streams ------------------------------------------------------------------------------------


def test_chat_stream_has_the_parts_that_clients_expect(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": TEXT}],
        max_completion_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {c.id for c in chunks} == {chunks[0].id}
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].choices == []
    assert usage(chunks[-1]).completion_tokens == 12
    reasons = [c.choices[0].finish_reason for c in chunks[:-1]]
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert reasons[-1] == "length"
    pieces = [c.choices[0].delta.content or "" for c in chunks[:-1]]
    assert TEXT.startswith("".join(pieces).rstrip("\ufffd"))
    assert not any("\ufffd" in p for p in pieces[:-1])


def test_completion_stream_has_one_chunk_for_each_token(echo: ServerProcess) -> None:
    body = {"model": MODEL, "prompt": TEXT, "max_tokens": 9, "stream": True}
    with echo.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        data = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert data[-1] == "[DONE]"
    chunks = [json.loads(d) for d in data[:-1]]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 8 + ["length"]
    assert all("usage" not in c for c in chunks)


def test_streams_of_several_choices_are_told_apart(client: OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL, prompt=["one two", "three"], max_tokens=6, stream=True
    )
    texts = {0: "", 1: ""}
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts[0].startswith("one two")
    assert texts[1].startswith("three")


def test_many_streams_at_once(echo: ServerProcess) -> None:
    async def one(client: openai.AsyncOpenAI, i: int) -> str:
        prompt = f"number {i} of many"
        stream = await client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=40, stream=True
        )
        text = "".join([c.choices[0].text async for c in stream])
        assert text.startswith(prompt)
        return text

    async def scenario() -> None:
        async with echo.async_client() as client:
            texts = await asyncio.gather(*(one(client, i) for i in range(40)))
        assert len(set(texts)) == 40

    asyncio.run(scenario())


# -- stop strings -------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        ("on the", "The 猫 sat — "),
        (["zzz", "\n\n"], TEXT.split("\n\n")[0]),
        (["👩‍👧"], "The 猫 sat — on the 👩‍"),
        ("never", TEXT),
    ],
)
def test_stop_strings(client: OpenAI, stop: Any, shown: str, stream: bool) -> None:
    n = tokens_of(client, TEXT)
    arguments: Any = {"model": MODEL, "prompt": TEXT, "max_tokens": n, "stop": stop}
    if stream:
        chunks = list(
            client.completions.create(
                **arguments, stream=True, stream_options={"include_usage": True}
            )
        )
        text = "".join(c.choices[0].text for c in chunks[:-1])
        reason = chunks[-2].choices[0].finish_reason
        count = usage(chunks[-1]).completion_tokens
    else:
        answer = client.completions.create(**arguments)
        text, reason = answer.choices[0].text, answer.choices[0].finish_reason
        count = usage(answer).completion_tokens
    assert text == shown
    assert reason == ("length" if shown == TEXT else "stop")
    assert count <= n


# -- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 2.5),
        ("temperature", float("nan")),
        ("temperature", "warm"),
        ("top_p", 0),
        ("max_tokens", 0),
        ("max_tokens", 10**30),
        ("n", 0),
        ("n", 1000),
        ("seed", 2**63),
        ("stop", [""]),
        ("stop", 7),
        ("logprobs", 21),
        ("stream_options", 3),
        ("prompt", []),
        ("prompt", [1, "a"]),
        ("prompt", [-1]),
        ("prompt", [10**6]),
        ("prompt", ""),
        ("prompt", "\ud800"),
        ("prompt", None),
        ("model", None),
        ("model", "\udfff"),
        ("stop", "\ud800"),
    ],
)
def test_a_bad_field_is_named(echo: ServerProcess, field: str, value: Any) -> None:
    body = {"model": MODEL, "prompt": "a", field: value}
    headers = {"content-type": "application/json"}
    response = echo.http.post("/v1/completions", content=json.dumps(body), headers=headers)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    if (field, value) == ("max_tokens", 10**30):
        assert error["code"] == "answer_too_large"
    else:
        assert error["param"] == field
        assert error["type"] == "invalid_request_error"
        assert field in error["message"]


def test_a_chat_message_that_is_not_text_is_refused(client: OpenAI) -> None:
    part: Any = {"type": "image_url", "image_url": {"url": "data:,"}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": [part]}])
    assert caught.value.param == "messages"
    assert "messages[0].content[0] is of type 'image_url': models are served for text alone" in (
        caught.value.message
    )
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[])
    assert caught.value.param == "messages"


def test_a_body_that_is_not_json(echo: ServerProcess) -> None:
    headers = {"content-type": "application/json"}
    response = echo.http.post("/v1/completions", content=b"{", headers=headers)
    assert response.status_code == 400
    assert "not JSON" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "headers", "says"),
    [
        (b"{}", {}, "the request has no Content-Type: send JSON, with `Content-Type: application/"),
        (b"{}", {"content-type": "text/plain"}, "the request has Content-Type 'text/plain': send"),
        (b"", {"content-type": "application/json"}, "the body is empty: send a JSON object"),
        (b"[]", {"content-type": "application/json"}, "the body must be a JSON object"),
    ],
)
def test_a_body_that_is_no_object(
    echo: ServerProcess, content: bytes, headers: dict[str, str], says: str
) -> None:
    response = echo.http.post("/v1/chat/completions", content=content, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(says)


def test_a_path_that_is_almost_one(echo: ServerProcess) -> None:
    response = echo.http.post("/v1/chat/completion", json={"model": MODEL})
    assert response.status_code == 404
    assert response.json()["error"]["message"].endswith("; did you mean 'completions'?")
    assert "mean" not in echo.http.get("/v1/zzz").json()["error"]["message"]


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/openai/v1/chat/completions", "/v1/chat/completions"),
        ("/completions", "/v1/completions"),
        ("/v2/embeddings", "/v1/embeddings"),
        ("/messages", "/v1/messages"),
        ("/responses", "/v1/responses"),
        ("/models", "/v1/models"),
        ("/v1/health", "/health"),
        ("/api/metrics", "/metrics"),
    ],
)
def test_a_path_under_another_address_leads_to_the_right_one(
    echo: ServerProcess, asked: str, meant: str
) -> None:
    for response in (echo.http.post(asked, json={"model": MODEL}), echo.http.get(asked)):
        assert response.status_code == 404
        assert response.json()["error"]["message"].endswith(f"; did you mean {meant!r}?")


@pytest.mark.parametrize("stream", [False, True])
def test_too_much_for_the_context(client: OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="a b c", max_tokens=256, stream=stream)
    assert caught.value.code == "context_length_exceeded"
    assert "256" in caught.value.message


@pytest.mark.parametrize(("name", "why"), [("nobody", "not served"), ("broken", "it is broken")])
def test_unknown_models(client: OpenAI, name: str, why: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model=name, prompt="a")
    assert caught.value.code == "model_not_found"
    assert why in caught.value.message
    assert f"; served: {MODEL}, wren-mini" in caught.value.message


def test_unknown_routes(echo: ServerProcess) -> None:
    assert echo.http.get("/v1/nothing").json()["error"]["code"] == "not_found"
    wrong = echo.http.get("/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_worker_refuses_has_its_status(client: OpenAI, stream: bool) -> None:
    """In a stream, too: nothing is sent before the first token."""
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model=MODEL, prompt="a", seed=REFUSE, stream=stream)


def test_a_request_that_breaks_is_an_error(client: OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="the job broke"):
        client.completions.create(model=MODEL, prompt="a", seed=BREAK)


def test_unknown_fields_are_ignored_with_one_warning(echo: ServerProcess) -> None:
    for unknown in ("frobnicate", "frobnicate", "the_last"):
        echo.client.completions.create(
            model=MODEL, prompt="a", extra_body={unknown: 1, "user": "me"}
        )
    echo.until_said("the_last")
    assert echo.output.count("frobnicate") == 1
    assert "'user'" not in echo.output


# -- metrics ------------------------------------------------------------------------------------


def test_metrics(client: OpenAI, echo: ServerProcess) -> None:
    before = sample(echo, "vllm_generation_tokens_total", model_name="wren-mini")
    client.completions.create(model="wren-mini", prompt=[7, 8], max_tokens=5)
    after = sample(echo, "vllm_generation_tokens_total", model_name="wren-mini")
    assert after - before == 5
    for name in (
        "vllm_time_to_first_token_seconds_count",
        "vllm_time_per_output_token_seconds_count",
        "vllm_e2e_request_latency_seconds_count",
        "vllm_prompt_tokens_total",
    ):
        assert sample(echo, name, model_name="wren-mini") > 0, name
    assert sample(echo, "vllm_num_requests_waiting", model_name=MODEL) == 0
    assert sample(echo, "ballast_pages", owner="weights", model=MODEL) == 4
    assert sample(echo, "ballast_pages", owner="arena", model="") == 3
    assert sample(echo, "ballast_pool_pages") == 100


def sample(server: ServerProcess, name: str, **labels: str) -> float:
    """A metric's value; 0 while nothing was counted."""
    from prometheus_client.parser import text_string_to_metric_families

    text = server.http.get("/metrics").text
    for family in text_string_to_metric_families(text):
        for found in family.samples:
            if found.name == name and labels.items() <= found.labels.items():
                return found.value
    return 0.0
