"""The training text: the same for the same seed, never the same for another."""

from __future__ import annotations

from itertools import islice

from ballast.fleet.text import conversations, documents, stories
from ballast.fleet.tokenizer import END, chat_text


def test_conversations_are_a_function_of_the_seed() -> None:
    first = list(islice(conversations(3), 50))
    assert first == list(islice(conversations(3), 50))
    assert first != list(islice(conversations(4), 50))
    assert list(islice(stories(3), 20)) == list(islice(stories(3), 20))
    for messages in first:
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert all(m["content"].strip() for m in messages)


def test_chat_text_marks_every_turn() -> None:
    text = chat_text([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}])
    assert text == f"<|user|>Hi{END}<|assistant|>Yes{END}"


def test_documents_come_with_python() -> None:
    docs = documents()
    assert docs == documents()
    assert sum(map(len, docs)) > 50_000
    assert len(set(docs)) == len(docs)
