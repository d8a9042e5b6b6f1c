"""A text is known to have too many tokens before it is tokenized, and never when it has not."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from ballast.fleet.tokenizer import train_tokenizer
from ballast.server.text.text_bound import TextBound, text_bound
from ballast.server.text.tokenizer import Tokenizer, TooManyTokens

LETTERS = "abc \n\u3000é한ῼ각"


def byte_level(*added: AddedToken) -> Backend:
    trained: Backend = train_tokenizer(["the cat sat " * 9], 300, 128).backend_tokenizer
    trained.add_tokens(list(added))
    return trained


def byte_fallback(**options: Any) -> Backend:
    """In the manner of Llama 2."""
    words = ["▁", "a", "b", "▁▁▁▁", "ab", "▁▁"]
    vocab = {"<unk>": 0} | {f"<0x{b:02X}>": 1 + b for b in range(256)}
    vocab |= {w: len(vocab) + i for i, w in enumerate(words)}
    merges = [("a", "b"), ("▁", "▁"), ("▁▁", "▁▁")]
    made = Backend(models.BPE(vocab, merges, unk_token="<unk>", **options))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.ByteFallback()
    return made


def with_parts(
    normalizer: Any = None, pre_tokenizer: Any = None, *added: AddedToken, **options: Any
) -> Backend:
    made = byte_fallback(**{"byte_fallback": True, "fuse_unk": True} | options)
    made.normalizer, made.pre_tokenizer = normalizer, pre_tokenizer
    made.add_tokens(list(added))
    return made


SOUND = {
    "byte level": byte_level(),
    "byte level, a token that takes blanks": byte_level(AddedToken("<x>", rstrip=True)),
    "byte fallback": byte_fallback(byte_fallback=True, fuse_unk=True),
    "one unknown token a character": byte_fallback(fuse_unk=False),
    "composed": with_parts(normalizers.NFC()),
    "composed, compatibly": with_parts(normalizers.NFKC()),
    "decomposed": with_parts(normalizers.NFD()),
    "shortened": with_parts(normalizers.Replace("ab", "a")),
    "lower case": with_parts(normalizers.Lowercase()),
    "blanks are dropped": with_parts(None, pre_tokenizers.WhitespaceSplit()),
    "blanks are kept": with_parts(None, pre_tokenizers.Split(" ", "isolated")),
    "a token that takes blanks": with_parts(None, None, AddedToken("c", lstrip=True)),
    "a token that normalizing lengthens": with_parts(normalizers.NFKD(), None, AddedToken("ﷺ")),
}
UNBOUND = {
    "unknown ones are fused": byte_fallback(fuse_unk=True),
    "unknown ones are dropped": Backend(models.BPE({"a": 0}, [])),
    "word pieces": Backend(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
    "stripped": with_parts(normalizers.Strip()),
    "accents are dropped": with_parts(normalizers.StripAccents()),
    "a letter is dropped": with_parts(normalizers.Replace("a", "")),
    "something is replaced": with_parts(normalizers.Replace(Regex("a+"), "b")),
    "a letter is removed": with_parts(None, pre_tokenizers.Split("a", "removed")),
    "words are cut out": with_parts(None, pre_tokenizers.CharDelimiterSplit("a")),
}


@pytest.mark.parametrize("backend", SOUND.values(), ids=SOUND)
@given(text=st.text(LETTERS) | st.text(" c") | st.text())
def test_no_text_exceeds_the_tokens_that_it_has(backend: Backend, text: str) -> None:
    bound = text_bound(backend)
    assert bound is not None
    tokens = len(backend.encode(text, add_special_tokens=False))
    assert not bound.exceeds(text, tokens)


@pytest.mark.parametrize("backend", UNBOUND.values(), ids=UNBOUND)
def test_no_bound_where_text_can_vanish(backend: Backend) -> None:
    assert text_bound(backend) is None


def test_blanks_count_where_they_have_tokens() -> None:
    assert TextBound(4, counts_blanks=True).exceeds(" " * 41, 10)
    assert not TextBound(4, counts_blanks=False).exceeds(" " * 41, 10)
    assert TextBound(4, counts_blanks=False).exceeds("a " * 41, 10)
    blank = "".join(c for c in map(chr, range(sys.maxunicode + 1)) if c.isspace())
    assert not TextBound(4, counts_blanks=False).exceeds(blank * 9, 1)


def test_a_text_that_cannot_fit_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(train_tokenizer(["the cat sat " * 9], 300, 128))
    assert len(tokenizer.encode("abcdefg " * 16, most=128)) == 128
    with pytest.raises(TooManyTokens) as counted:
        tokenizer.encode("abcdefg " * 16 + "a", most=128)
    assert counted.value.found == 129

    class Untouched:
        """A backend that must not be asked."""

    monkeypatch.setattr(tokenizer, "_backend", Untouched())
    with pytest.raises(TooManyTokens) as refused:
        tokenizer.encode("hello wor " * 800_000, most=128)
    assert refused.value.found is None
