"""Outputs as blocks: text and calls in the order in which the model wrote them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ballast.server.text.output_blocks import (
    BlockClosedEvent,
    BlockOpenedEvent,
    Grown,
    OutputBlock,
    OutputBlocks,
    Step,
)
from ballast.server.text.pieces import OutputPiece, ScoredToken
from ballast.server.tools.delta import Arguments, Began, Content
from tests.server.tools.test_tools import TOOLS, dialect, written

CALLS = [("now", {}), ("weather", {"city": "Rom"})]


def piece(*deltas: Content | Began | Arguments, end: str | None = None) -> OutputPiece:
    text = "".join(d.text for d in deltas if isinstance(d, Content))
    return OutputPiece(0, text, deltas=deltas, finish_reason=end)


def steps(*pieces: OutputPiece) -> list[tuple[str, int, str]]:
    """Kind, index and fragment of each step; checks that blocks are as they are then."""
    blocks, found = OutputBlocks(), list[tuple[str, int, str]]()
    for each in pieces:
        for step in blocks.push(each):
            found.append(shown(step))
            if isinstance(step, BlockOpenedEvent):
                assert step.block is blocks.blocks[-1]
                assert step.block.text == ""
    assert blocks.ended
    return found


def shown(step: Step) -> tuple[str, int, str]:
    block: OutputBlock = step.block
    if isinstance(step, BlockOpenedEvent):
        return "open", block.index, "" if block.call is None else block.call.name
    if isinstance(step, Grown):
        return "grow", block.index, step.fragment
    assert isinstance(step, BlockClosedEvent)
    return "last" if step.last else "close", block.index, block.text


def test_blocks_follow_each_other() -> None:
    call = Began(0, "c", "now")
    assert steps(
        piece(Content("a")),
        piece(Content("b"), call, Arguments(0, "{")),
        piece(Arguments(0, "}"), Content(" c")),
        piece(Began(1, "d", "weather"), end="length"),
    ) == [
        ("open", 0, ""),
        ("grow", 0, "a"),
        ("grow", 0, "b"),
        ("close", 0, "ab"),
        ("open", 1, "now"),
        ("grow", 1, "{"),
        ("grow", 1, "}"),
        ("close", 1, "{}"),
        ("open", 2, ""),
        ("grow", 2, " c"),
        ("close", 2, " c"),
        ("open", 3, "weather"),
        ("last", 3, ""),
    ]


def test_an_empty_output_is_one_empty_text() -> None:
    assert steps(OutputPiece(0, ""), piece(end="stop")) == [("open", 0, ""), ("last", 0, "")]


def test_tokens_are_scored_with_the_text_that_they_end_up_in() -> None:
    """The first is held back; the last has no text."""
    scores = [ScoredToken(token, 0, -1.0) for token in range(4)]
    blocks = OutputBlocks()
    pieces = [
        OutputPiece(0, "", (scores[0],)),
        OutputPiece(0, "ab", (scores[1],)),
        OutputPiece(0, "", (scores[2], scores[3]), finish_reason="stop"),
    ]
    grown = [s for p in pieces for s in blocks.push(p) if isinstance(s, Grown)]
    assert [(s.fragment, s.scored) for s in grown] == [
        ("ab", tuple(scores[:2])),
        ("", tuple(scores[2:])),
    ]


@given(st.data())
def test_nothing_is_lost_however_the_text_is_cut(data: st.DataObject) -> None:
    assert TOOLS is not None
    text = "I look. " + written("hermes", *CALLS) + "<it> rains"
    parser = dialect("hermes").parser(TOOLS)
    blocks = OutputBlocks()
    pieces = []
    while text:
        size = data.draw(st.integers(1, len(text)))
        pieces.append(piece(*parser.push(text[:size])))
        text = text[size:]
    pieces.append(piece(*parser.flush(), end="stop"))
    joined = data.draw(st.booleans())
    if joined and len(pieces) > 1:  # the end joins the last token
        pieces[-2:] = [replace(pieces[-2].ended_by(pieces[-1]))]
    open_now: OutputBlock | None = None
    for each in pieces:
        for step in blocks.push(each):
            if isinstance(step, BlockOpenedEvent):
                assert open_now is None
                open_now = step.block
            assert step.block is open_now
            if isinstance(step, BlockClosedEvent):
                open_now = None
    assert open_now is None
    found = [(None if b.call is None else b.call.name, b.text) for b in blocks.blocks]
    assert found == [
        (None, "I look. "),
        ("now", "{}"),
        ("weather", '{"city": "Rom"}'),
        (None, "<it> rains"),
    ]
