"""Encoders of BERT's kind against transformers: embeddings, and scores of pairs of texts."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from ballast.bench.inprocess import InProcess
from ballast.core.errors import UnsupportedModel
from ballast.core.event import EmbeddingOutput
from ballast.core.job import SequenceWork
from ballast.core.request import Submission
from ballast.core.units import MiB
from ballast.server.text.tokenizer import Tokenizer, TooManyTokens
from benchmarks.exactness import Verdict, asked, compare, fleet, tight
from benchmarks.families import config, make
from benchmarks.tiny import tiny
from tests.models.tiny import Served

_SCORES = ("score", AutoModelForSequenceClassification, {"num_labels": 1})
KINDS: dict[str, tuple[str, str, Any, dict[str, Any]]] = {
    "mean": ("bert", "mean", AutoModel, {}),
    "cls, positions after padding": ("xlm-roberta", "cls", AutoModel, {}),
    "last, windows": ("modernbert", "last", AutoModel, {}),
    "pairs": ("bert", *_SCORES),
}


def pooled(path: Path, mode: str) -> None:
    """As sentence-transformers saves how a model pools."""
    steps = [
        {"idx": i, "name": str(i), "path": where, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, where) in enumerate((("Transformer", ""), ("Pooling", "1_Pooling")))
    ]
    (path / "modules.json").write_text(json.dumps(steps))
    (path / "1_Pooling").mkdir()
    mode = {"last": "lasttoken"}.get(mode, mode)
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": mode}))


def saved(path: Path, kind: str, mode: str, auto: Any, more: dict[str, Any]) -> Any:
    model = make(path, tiny(kind, is_decoder=False, **more), auto=auto)
    if mode != "score":
        pooled(path, mode)
    return model


def texts(*lengths: int) -> list[tuple[int, ...]]:
    rng = random.Random(len(lengths))
    return [tuple(rng.randrange(3, 900) for _ in range(n)) for n in lengths]


def expected(model: Any, mode: str, text: tuple[int, ...], second: int) -> torch.Tensor:
    types = {}
    if second:
        types["token_type_ids"] = (torch.arange(len(text)) >= second).long()[None]
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([text]), **types)
    if mode == "score":
        return output.logits[0]  # type: ignore[no-any-return]
    states = output.last_hidden_state[0]
    vector = states.mean(0) if mode == "mean" else states[0 if mode == "cls" else -1]
    return torch.nn.functional.normalize(vector, dim=0)


@pytest.mark.parametrize("what", KINDS)
def test_vectors_are_those_of_transformers(what: str, tmp_path: Path) -> None:
    kind, mode, auto, more = KINDS[what]
    model = saved(tmp_path, kind, mode, auto, more)
    served = Served(tmp_path)
    assert (served.spec.embeds, served.spec.generates, served.spec.pooling) == (True, False, mode)
    asked = texts(5, 40, 5, 1)
    seconds = [3, 20, 2, 0] if mode == "score" else [0] * 4
    work = [
        SequenceWork(str(i), text, 0, [], None, embed=True, second_text=second)
        for i, (text, second) in enumerate(zip(asked, seconds, strict=True))
    ]
    results = served.model.run(work)
    served.close()
    for result, text, second in zip(results, asked, seconds, strict=True):
        assert isinstance(result, EmbeddingOutput)
        ours = torch.from_numpy(np.frombuffer(result.values, "<f4").copy())
        theirs = expected(model, mode, text, second)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_a_text_is_computed_whole(tmp_path: Path) -> None:
    """However many wait: a job of 96 tokens has one text of 90, or several that fit together."""
    model = saved(tmp_path / "m", "bert", "mean", AutoModel, {})
    asked = texts(90, 50, 60, 96, 3, 40)
    with InProcess(fleet({"m": tmp_path / "m"}, 64 * MiB)) as server:
        assert server.device.state.models["m"].spec.max_model_len == 96
        answers = server.generate(
            [
                Submission(id=str(i), model="m", prompt=text, max_tokens=0, embed=True)
                for i, text in enumerate(asked)
            ]
        )
    for i, text in enumerate(asked):
        ours = np.frombuffer(answers[str(i)].embedding or b"", "<f4").copy()
        theirs = expected(model, "mean", text, 0)
        torch.testing.assert_close(torch.from_numpy(ours), theirs, rtol=0, atol=1e-5)


def test_encoders_beside_a_chat_model_in_a_pool_for_one_of_them(tmp_path: Path) -> None:
    """Embedder, cross encoder and chat model evict each other, and nothing changes."""
    chat = make(tmp_path / "chat", config("llama"))
    embedder = saved(tmp_path / "embedder", "bert", "mean", AutoModel, {})
    ranker = saved(tmp_path / "ranker", "bert", *_SCORES)
    settings = tight({n: tmp_path / n for n in ("chat", "embedder", "ranker")}, models=1)
    asked_of = {"embedder": texts(5, 90, 17), "ranker": texts(30, 8, 61)}
    verdict, moved = Verdict(), Counter[str]()
    with InProcess(settings) as server:
        for turn in range(3):
            requests = asked(["chat"], 2, seed=turn, new_tokens=24)
            requests = [replace(r, id=f"{turn}-{r.id}") for r in requests]
            vectors = [
                Submission(
                    id=f"{turn}-{name}-{i}",
                    model=name,
                    prompt=text,
                    max_tokens=0,
                    embed=True,
                    second_text=4 if name == "ranker" else 0,
                )
                for name, of in asked_of.items()
                for i, text in enumerate(of)
            ]
            answers = server.generate([*vectors, *requests])
            for r in requests:
                compare(chat, r.prompt, answers[r.id], verdict)
            for v in vectors:
                ours = np.frombuffer(answers[v.id].embedding or b"", "<f4").copy()
                given = (ranker, "score") if v.model == "ranker" else (embedder, "mean")
                theirs = expected(*given, v.prompt, v.second_text)
                torch.testing.assert_close(torch.from_numpy(ours), theirs, rtol=0, atol=1e-5)
        for m in server.device.snapshot().models:
            moved[m.name] += m.evictions
    assert verdict.ok, verdict.to_json()
    assert all(moved[name] > 0 for name in ("chat", "embedder", "ranker")), moved


@pytest.mark.parametrize(
    ("more", "mode", "why"),
    [({"num_labels": 3}, None, "has 3 labels"), ({}, "max", "asks for other steps")],
)
def test_other_heads_and_poolings_are_refused(
    more: dict[str, Any], mode: str | None, why: str, tmp_path: Path
) -> None:
    auto = AutoModelForSequenceClassification if mode is None else AutoModel
    make(tmp_path, tiny("bert", is_decoder=False, **more), auto=auto)
    if mode is not None:
        pooled(tmp_path, mode)
    with pytest.raises(UnsupportedModel, match=why):
        Served(tmp_path)


def test_pairs_are_encoded_as_the_tokenizer_writes_them() -> None:
    words = ["[UNK]", "[CLS]", "[SEP]", "a", "ship", "sails"]
    backend = Backend(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"))
    assert tokenizer.encode_pair("a ship", "sails", 16) == ([1, 3, 4, 2, 5, 2], 4)
    with pytest.raises(TooManyTokens):
        tokenizer.encode_pair("a ship", "sails", 5)
