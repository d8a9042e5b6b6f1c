"""A tokenizer whose native code panics fails a request, or its model, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ballast.core.errors import CheckpointError, TokenizerFailed
from ballast.fleet.tokenizer import train_tokenizer
from ballast.server.http.faults import Fault
from ballast.server.text.tokenizer import Tokenizer


def tokenizer(changed: Callable[[Backend], None]) -> Tokenizer:
    backend = Backend(models.WordLevel({"aaaa": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    changed(backend)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"))


def panics_in_encoding(backend: Backend) -> None:
    backend.pre_tokenizer = pre_tokenizers.FixedLength(0)


def panics_in_decoding(backend: Backend) -> None:
    backend.decoder = decoders.Strip("a", 9, 9)


def lacks_unknown(backend: Backend) -> None:
    backend.model = models.WordPiece({"b": 0}, unk_token="none")


def push(tokenizer: Tokenizer) -> str:
    detokenizer = tokenizer.detokenizer()
    return detokenizer.push(0) + detokenizer.flush()


USES: dict[str, tuple[Callable[[Backend], None], Callable[[Tokenizer], object]]] = {
    "encode": (panics_in_encoding, lambda t: t.encode("x y")),
    "encode, an error": (lacks_unknown, lambda t: t.encode("x y")),
    "decode": (panics_in_decoding, lambda t: t.decode([0])),
    "token_text": (panics_in_decoding, lambda t: t.token_text(0)),
    "detokenizer": (panics_in_decoding, push),
}


@pytest.mark.parametrize("use", USES)
def test_a_panic_fails_the_request(use: str) -> None:
    change, failing = USES[use]
    made = tokenizer(change)
    with pytest.raises(TokenizerFailed, match="the model's tokenizer failed") as raised:
        failing(made)
    fault = Fault.of(raised.value)
    assert (fault.status, fault.code) == (422, "tokenizer_failed")
    assert made.spelled([0])


class Panic(BaseException):
    """As native code raises it: no Exception."""


def test_a_panic_while_loading_fails_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panics(*arguments: Any, **more: Any) -> None:
        raise Panic("index out of bounds")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", panics)
    with pytest.raises(CheckpointError, match="no usable tokenizer: Panic: index out of bounds"):
        Tokenizer.load(tmp_path)


def test_an_error_in_what_is_read_after_loading_fails_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_tokenizer(["hello world"] * 10, 300, 64).save_pretrained(tmp_path)
    monkeypatch.setattr(json, "loads", lambda *_: {}[0])
    with pytest.raises(CheckpointError, match="no usable tokenizer: "):
        Tokenizer.load(tmp_path)
