"""Text comes whole: no character is ever cut, whatever the tokens are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ballast.fleet.tokenizer import train_tokenizer
from ballast.server.text.detokenize import ByteDetokenizer, Detokenizer, WindowDetokenizer
from ballast.server.text.tokenizer import Tokenizer
from tests.effort import tries

TRICKY = [
    "plain words, and spaces  two   three",
    "naïve café – “quoted” … ½ €",
    "日本語のテキスト、漢字とかな",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 skin, e\u0301 combined",
    "עברית العربية हिन्दी ไทย",
    "\ufffd itself, and \u0000 and \u202e and \U0010ffff",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𒀀 line\nbreaks\r\ntabs\t",
    " leading and trailing ",
]


def byte_level() -> Tokenizer:
    return Tokenizer(train_tokenizer([*TRICKY[:3], "the cat sat on the mat " * 9], 400, 128))


def byte_fallback() -> Tokenizer:
    """In the manner of Llama 2: words with U+2581 for a space, other characters as bytes."""
    words = ["▁", "a", "b", "e", "t", "h", "▁t", "he", "▁the", "日"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{b:02X}>": 3 + b for b in range(256)}
    vocab |= {w: len(vocab) + i for i, w in enumerate(words)}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    backend = Backend(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return Tokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
        )
    )


def word_piece() -> Tokenizer:
    """Tokens that are not spelled in bytes: decoded through a window."""
    words = ["[UNK]", "the", "cat", "##s", "sat", "on", "日", "##本"]
    backend = Backend(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"))


BYTE_LEVEL, BYTE_FALLBACK, WORD_PIECE = byte_level(), byte_fallback(), word_piece()


def pieces(detokenizer: Detokenizer, tokens: list[int]) -> list[str]:
    return [*(detokenizer.push(t) for t in tokens), detokenizer.flush()]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["level", "fallback"])
@pytest.mark.parametrize("text", TRICKY)
def test_text_comes_back_in_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    got = pieces(tokenizer.detokenizer(), tokenizer.encode(text, special=False))
    assert "".join(got) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in got)


def reference(tokenizer: Tokenizer) -> Any:
    return tokenizer._tokenizer


@given(st.lists(st.integers(0, len(reference(BYTE_LEVEL)) - 1), max_size=40))
@settings(max_examples=tries(60, all=200))
def test_any_tokens_give_what_the_library_gives(tokens: list[int]) -> None:
    got = "".join(pieces(BYTE_LEVEL.detokenizer(), tokens))
    assert got == reference(BYTE_LEVEL).decode(tokens, skip_special_tokens=True)


def test_bytes_that_are_no_text_hold_nothing_up() -> None:
    """A model may emit garbage for ever; at most one character's bytes are waited for."""
    first_byte = BYTE_FALLBACK.encode("é", special=False)[0]
    got = pieces(BYTE_FALLBACK.detokenizer(), [first_byte] * 5)
    assert got == ["", "\ufffd", "\ufffd", "\ufffd", "\ufffd", "\ufffd"]


def test_special_and_unknown_tokens_have_no_text() -> None:
    tokenizer = BYTE_LEVEL
    end = tokenizer.special_token("<|end|>")
    assert end is not None
    assert "".join(pieces(tokenizer.detokenizer(), [end, 10**6])) == ""
    assert tokenizer.special_token("the") is None
    assert tokenizer.special_token("<|user|>") in tokenizer.special_ids


def test_byte_tokenizers_are_recognised() -> None:
    assert isinstance(BYTE_LEVEL.detokenizer(), ByteDetokenizer)
    assert isinstance(BYTE_FALLBACK.detokenizer(), ByteDetokenizer)
    assert isinstance(WORD_PIECE.detokenizer(), WindowDetokenizer)


@given(st.lists(st.integers(1, 7), max_size=60))
def test_a_window_gives_what_the_whole_gives(tokens: list[int]) -> None:
    got = "".join(pieces(WORD_PIECE.detokenizer(), tokens))
    assert got == reference(WORD_PIECE).decode(tokens, skip_special_tokens=True)


def test_a_window_waits_for_characters_but_not_for_ever() -> None:
    """Three bytes a character, one a token; then bytes that never make one."""

    def decode(tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    text = "日本語" * 20
    got = pieces(WindowDetokenizer(decode), list(text.encode()))
    assert "".join(got) == text
    assert not any("\ufffd" in piece for piece in got)
    garbage = WindowDetokenizer(decode)
    shown = "".join(garbage.push(0xE3) for _ in range(100))
    assert len(shown) > 50


def test_single_tokens_for_log_probabilities() -> None:
    token = BYTE_LEVEL.encode("é", special=False)[0]
    text, raw = BYTE_LEVEL.token_text(token)
    assert raw in ("é".encode(), "é".encode()[:1])
    assert text == raw.decode(errors="replace")
    end = BYTE_LEVEL.special_token("<|end|>")
    assert end is not None
    assert BYTE_LEVEL.token_text(end) == ("<|end|>", b"<|end|>")
