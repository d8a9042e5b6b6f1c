"""Group the pieces of one choice into blocks: runs of text or of reasoning, and tool calls.

Chat completions have one text and a list of calls; the Messages and Responses APIs, whose forms use
this, have a list of blocks in the order of the output, each opened, grown and closed in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ballast.server.text.pieces import OutputPiece, ScoredToken
from ballast.server.tools.delta import Arguments, Began, Content, Thought

FRAGMENT_BYTES = 60
"""Memory of a fragment beside its characters."""


@dataclass(slots=True, eq=False)
class OutputBlock:
    """A run of text or of reasoning, or one call."""

    index: int
    """Index among the blocks of its output, from 0."""
    call: Began | None
    """The tool call; None for text and reasoning."""
    thought: bool = False
    """Whether it is reasoning."""
    fragments: list[str] = field(default_factory=list)
    """Fragments of the text, or of the call's arguments (JSON)."""

    @property
    def text(self) -> str:
        return "".join(self.fragments)

    @property
    def says(self) -> bool:
        """Whether it is text of the answer."""
        return self.call is None and not self.thought


@dataclass(frozen=True, slots=True)
class BlockOpenedEvent:
    block: OutputBlock


@dataclass(frozen=True, slots=True)
class Grown:
    block: OutputBlock
    fragment: str
    """Added text; may be empty where tokens are scored."""
    scored: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockClosedEvent:
    block: OutputBlock
    last: bool
    """Whether the output ends with this block."""


Step = BlockOpenedEvent | Grown | BlockClosedEvent


class OutputBlocks:
    """Groups the pieces of one output into blocks. At most one block is open: the last."""

    def __init__(self) -> None:
        self.blocks: list[OutputBlock] = []
        self.ended = False
        self.held = 0
        """Bytes that the blocks' texts take, about."""
        self._open: OutputBlock | None = None
        self._scored: list[ScoredToken] = []
        """Scored tokens whose text is still held back; they are added with the text."""

    def push(self, piece: OutputPiece) -> Iterator[Step]:
        """Yield the steps by which a piece changes the blocks, each applied before it is yielded. A
        piece with a `finish_reason` closes all blocks; there is at least one then."""
        self._scored += piece.scored
        for part in piece.parts:
            if isinstance(part, Content | Thought):
                thought = isinstance(part, Thought)
                if self._open is None or self._open.call or self._open.thought is not thought:
                    yield from self._next(None, thought=thought)
                yield from self._grow(part.text)
            elif isinstance(part, Began):
                yield from self._next(part)
            elif isinstance(part, Arguments):
                yield from self._grow(part.fragment)
        if piece.finish_reason is None:
            return
        if not self.blocks:
            yield from self._next(None)
        if self._scored and self._open is not None and self._open.says:
            yield from self._grow("")
        self.ended = True
        yield from self._close(last=True)

    def _next(self, call: Began | None, *, thought: bool = False) -> Iterator[Step]:
        yield from self._close(last=False)
        self._open = OutputBlock(len(self.blocks), call, thought)
        self.blocks.append(self._open)
        yield BlockOpenedEvent(self._open)

    def _grow(self, fragment: str) -> Iterator[Step]:
        block = self._open
        assert block is not None  # arguments follow the beginning of their call
        scored = tuple(self._scored)
        self._scored.clear()
        if not block.says:
            scored = ()  # only text has log-probabilities
        block.fragments.append(fragment)
        self.held += FRAGMENT_BYTES + len(fragment)
        yield Grown(block, fragment, scored)

    def _close(self, *, last: bool) -> Iterator[Step]:
        block, self._open = self._open, None
        if block is not None:
            yield BlockClosedEvent(block, last)
