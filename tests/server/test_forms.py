"""What answers look like: log-probabilities, echoed prompts, ends, pings, texts and embeddings."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import BadRequestError, OpenAI

from tests.cluster.fake_device import HOLD, SILENT
from tests.server.process import ServerProcess, server

MODEL, EMBEDDER = "atlas-chat", "wren-mini"


@pytest.fixture(scope="module")
def client(echo: ServerProcess) -> OpenAI:
    return echo.client


def tokenize(echo: ServerProcess, **fields: Any) -> Any:
    response = echo.http.post("/tokenize", json={"model": MODEL, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def events(echo: ServerProcess, route: str, /, **fields: Any) -> list[Any]:
    """Of a stream, which must end well."""
    with echo.http.stream("POST", route, json={"model": MODEL, **fields, "stream": True}) as r:
        data = [line.removeprefix("data: ") for line in r.iter_lines() if line]
    assert data.pop() == "[DONE]"
    return [json.loads(d) for d in data]


# -- log-probabilities --------------------------------------------------------------------------


def test_alternatives_of_chat(client: OpenAI, echo: ServerProcess) -> None:
    messages: Any = [{"role": "user", "content": "a b c"}]
    ids = tokenize(echo, messages=messages)["tokens"]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, logprobs=True, top_logprobs=2, max_tokens=3
    )
    result = answer.choices[0].logprobs
    assert result is not None
    assert result.content is not None
    assert len(result.content) == 3
    for token, one in zip(ids, result.content, strict=False):
        assert one.logprob == -0.5
        assert [t.logprob for t in one.top_logprobs] == [-0.5, -1.5]
        assert one.top_logprobs[0].token == one.token
        assert one.top_logprobs[1].token == echo_text(echo, token + 1)


def echo_text(echo: ServerProcess, token: int) -> str:
    response = echo.http.post("/detokenize", json={"model": MODEL, "tokens": [token]})
    return str(response.json()["prompt"])


def test_alternatives_of_completions(client: OpenAI, echo: ServerProcess) -> None:
    ids = tokenize(echo, prompt="a b c")["tokens"]
    answer = client.completions.create(model=MODEL, prompt=ids, logprobs=2, max_tokens=3)
    result = answer.choices[0].logprobs
    assert result is not None
    assert result.tokens == ["a", " b", " c"]
    assert result.text_offset == [0, 1, 3]
    assert result.top_logprobs is not None
    assert [list(t.values()) for t in result.top_logprobs] == [[-0.5, -1.5]] * 3
    assert [next(iter(t)) for t in result.top_logprobs] == result.tokens


def test_offsets_count_what_a_possible_stop_string_holds_back(
    client: OpenAI, echo: ServerProcess
) -> None:
    ids = tokenize(echo, prompt="a b c")["tokens"]
    answer = client.completions.create(
        model=MODEL, prompt=ids, logprobs=0, max_tokens=3, stop=["a b d"]
    )
    result = answer.choices[0].logprobs
    assert result is not None
    assert result.text_offset == [0, 1, 3]


@pytest.mark.parametrize("as_ids", [False, True])
def test_an_echoed_prompt_is_scored(client: OpenAI, echo: ServerProcess, as_ids: bool) -> None:
    """As evaluation harnesses ask for it."""
    ids = tokenize(echo, prompt="a b c")["tokens"]
    prompt = ids if as_ids else "a b c"
    answer = client.completions.create(
        model=MODEL, prompt=prompt, logprobs=1, echo=True, max_tokens=1, temperature=0
    )
    choice = answer.choices[0]
    assert choice.text == "a b ca"
    result = choice.logprobs
    assert result is not None
    assert result.tokens == ["a", " b", " c", "a"]
    assert result.token_logprobs == [None, -1.0, -2.0, -0.5]
    assert result.text_offset == [0, 1, 3, 5]
    assert result.top_logprobs is not None
    assert result.top_logprobs[0] is None
    assert result.top_logprobs[1:] == [{" b": -1.0}, {" c": -2.0}, {"a": -0.5}]


def test_a_prompt_can_be_scored_without_any_output(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["a b c", "d"], logprobs=0, echo=True, max_tokens=0
    )
    assert [c.text for c in answer.choices] == ["a b c", "d"]
    assert [c.finish_reason for c in answer.choices] == ["length"] * 2
    scores = [c.logprobs.token_logprobs for c in answer.choices if c.logprobs]
    assert scores == [[None, -1.0, -2.0], [None]]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_an_echo_is_streamed_first(echo: ServerProcess) -> None:
    chunks = events(echo, "/v1/completions", prompt="a b c", echo=True, max_tokens=2, n=2)
    for index in range(2):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert [c["text"] for c in own] == ["a b c", "a", " b"]
        assert [c["finish_reason"] for c in own] == [None, None, "length"]


# -- ends ---------------------------------------------------------------------------------------


def test_the_last_token_tells_why_it_is_the_last(echo: ServerProcess) -> None:
    messages = [{"role": "user", "content": "a b c d e f g"}]
    chunks = events(echo, "/v1/chat/completions", messages=messages, max_tokens=5)
    assert len(chunks) == 1 + 5
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 5 + ["length"]
    assert chunks[-1]["choices"][0]["delta"]["content"]


def test_text_held_back_comes_with_the_end(echo: ServerProcess) -> None:
    arguments: Any = {"prompt": "a b c", "max_tokens": 3, "stop": " c d"}
    chunks = events(echo, "/v1/completions", **arguments)
    result = [(c["choices"][0]["text"], c["choices"][0]["finish_reason"]) for c in chunks]
    assert result == [("a", None), (" b", None), (" c", "length")]


@pytest.mark.parametrize("stream", [False, True])
def test_what_stopped_an_output_is_told(echo: ServerProcess, stream: bool) -> None:
    ids = tokenize(echo, prompt="a b c")["tokens"]
    for fields, text, reason in (
        ({"stop": ["x", " b"]}, "a", " b"),
        ({"stop_token_ids": [ids[1]]}, "a", ids[1]),
        ({"stop": " b", "min_tokens": 2}, "a b ca", " b"),
        ({"stop_token_ids": [ids[1]], "min_tokens": 2}, "a b ca", ids[1]),
    ):
        body = {"model": MODEL, "prompt": ids, "max_tokens": 9, **fields}
        if stream:
            choices = [c["choices"][0] for c in events(echo, "/v1/completions", **body)]
        else:
            choices = echo.http.post("/v1/completions", json=body).json()["choices"]
        assert "".join(c["text"] for c in choices) == text
        assert choices[-1]["finish_reason"] == "stop"
        assert choices[-1]["stop_reason"] == reason


# -- silence ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def impatient(echo_file: Path) -> Iterator[ServerProcess]:
    with server(echo_file, "--echo", "--ping", "0.05") as running:
        yield running


@pytest.mark.parametrize(("seed", "tokens"), [(SILENT, 0), (HOLD, 2)])
def test_silence_is_filled_with_pings(impatient: ServerProcess, seed: int, tokens: int) -> None:
    """Before the first token, and after some."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "a"}],
        "seed": seed,
        "stream": True,
    }
    with impatient.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        lines = (line for line in response.iter_lines() if line)
        first = json.loads(next(lines).removeprefix("data: "))
        assert first["choices"][0]["delta"]["role"] == "assistant"
        for _ in range(tokens):
            assert "content" in next(lines)
        assert [next(lines) for _ in range(3)] == [": ping"] * 3


# -- texts --------------------------------------------------------------------------------------


def test_tokens_of_a_text_and_back(echo: ServerProcess) -> None:
    text = "The 猫 sat — on the 👩‍👩‍👧 mat."
    result = tokenize(echo, prompt=text, return_token_strs=True)
    assert result["count"] == len(result["tokens"]) == len(result["token_strs"])
    assert result["max_model_len"] == 256
    back = echo.http.post("/detokenize", json={"model": MODEL, "tokens": result["tokens"]})
    assert back.json() == {"prompt": text}
    assert tokenize(echo, prompt="")["tokens"] == []


def test_tokens_of_a_conversation(echo: ServerProcess, client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "a b"}]
    result = tokenize(echo, messages=messages)
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == result["count"]
    shorter = tokenize(echo, messages=messages, add_generation_prompt=False)["tokens"]
    assert result["tokens"][: len(shorter)] == shorter
    assert len(shorter) < result["count"]


def test_an_answer_can_go_on_with_the_last_message(echo: ServerProcess) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]
    tokens = tokenize(echo, messages=messages, continue_final_message=True)["tokens"]
    assert tokens[-2:] == tokenize(echo, prompt="b c", add_special_tokens=False)["tokens"]


def test_special_tokens_are_shown_where_asked(echo: ServerProcess) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 2,
        "skip_special_tokens": False,
    }
    answer = echo.http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "<|user|>a"


@pytest.mark.parametrize("form", ["float", "base64"])
def test_embeddings(echo: ServerProcess, form: str) -> None:
    body = {"model": EMBEDDER, "input": [[5, 6], [7, 8, 9]], "encoding_format": form}
    result = echo.http.post("/v1/embeddings", json=body).json()
    assert [d["index"] for d in result["data"]] == [0, 1]
    values = [d["embedding"] for d in result["data"]]
    if form == "base64":
        values = [list(struct.unpack("<8f", base64.b64decode(v))) for v in values]
    assert values == [[2, 5, 6, 0, 0, 0, 0, 0], [3, 7, 8, 9, 0, 0, 0, 0]]
    assert result["usage"] == {"prompt_tokens": 5, "total_tokens": 5}


def test_as_many_texts_are_embedded_as_openai_allows(client: OpenAI) -> None:
    """LangChain sends a thousand at a time."""
    result = client.embeddings.create(model=EMBEDDER, input=["a"] * 2048)
    assert len(result.data) == 2048
    with pytest.raises(BadRequestError, match=r"input: must be .* a list of at most 2048"):
        client.embeddings.create(model=EMBEDDER, input=["a"] * 2049)


def test_documents_are_ranked_by_the_cosine_of_their_embeddings(echo: ServerProcess) -> None:
    documents = ["xyz", "ab", "a"]
    body = {"model": EMBEDDER, "query": "ab", "documents": documents}
    result = echo.http.post("/v1/rerank", json=body).json()
    embedded = {"model": EMBEDDER, "input": ["ab", *documents]}
    data = echo.http.post("/v1/embeddings", json=embedded).json()
    query, *others = (np.array(d["embedding"]) for d in data["data"])
    cosines = [query @ v / np.linalg.norm(query) / np.linalg.norm(v) for v in others]
    order = sorted(range(3), key=lambda i: -cosines[i])
    assert [one["index"] for one in result["results"]] == order
    assert order[0] == 1
    assert [one["document"]["text"] for one in result["results"]] == [documents[i] for i in order]
    for one in result["results"]:
        assert one["relevance_score"] == pytest.approx(cosines[one["index"]])
    assert result["usage"] == data["usage"]
    more = {**body, "top_n": 2, "return_documents": False}
    fewer = echo.http.post("/v1/rerank", json=more).json()["results"]
    scores = [(one["index"], one["relevance_score"]) for one in result["results"]]
    assert fewer == [{"index": i, "relevance_score": score} for i, score in scores[:2]]


def test_pairs_of_texts_are_scored(echo: ServerProcess) -> None:
    def score(first: Any, second: Any) -> list[float]:
        body = {"model": EMBEDDER, "text_1": first, "text_2": second}
        data = echo.http.post("/v1/score", json=body).json()["data"]
        assert [(d["index"], d["object"]) for d in data] == [(i, "score") for i in range(len(data))]
        return [d["score"] for d in data]

    [same] = score("ab", "ab")
    assert same == pytest.approx(1)
    ab, xyz = score("ab", ["ab", "xyz"])
    assert (ab, score("ab", "xyz")) == (pytest.approx(1), [pytest.approx(xyz)])
    assert xyz < 0.999
    assert score(["ab", "xyz"], ["xyz", "xyz"]) == [pytest.approx(xyz), pytest.approx(1)]
    assert len(score("a", ["b"] * 100)) == 100


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        ("score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("score", {"text_1": ["a"] * 1500, "text_2": ["c"] * 1500}, "text_2"),
        ("score", {"text_1": "a", "text_2": []}, "text_2"),
        ("score", {"text_1": "a", "text_2": "a" * 3000}, "text_2"),
        ("score", {"model": MODEL, "text_1": "a", "text_2": "b"}, "model"),
        ("rerank", {"query": "a", "documents": []}, "documents"),
        ("rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
        ("rerank", {"query": "a", "documents": ["a"] * 2048}, "documents"),
    ],
)
def test_scores_that_cannot_be_computed(
    echo: ServerProcess, route: str, fields: dict[str, Any], param: str
) -> None:
    answer = echo.http.post(f"/v1/{route}", json={"model": EMBEDDER, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_embeddings_by_the_official_client(client: OpenAI) -> None:
    result = client.embeddings.create(model=EMBEDDER, input=["a", "a"], dimensions=8)
    assert result.data[0].embedding == result.data[1].embedding
    assert result.data[0].embedding[0] == 1.0
