"""What ranks say to each other arrives as it was; faults arrive as faults, and an end as an end."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from ballast.core.errors import BrokenPromise, DeviceError
from ballast.core.event import TransferDoneEvent
from ballast.core.job import Scoring, SequenceWork
from ballast.core.link import LinkRates
from ballast.core.request import Sampling
from ballast.core.settings import DeviceSettings, ModelSettings
from ballast.transport.decoding import MalformedMessage
from ballast.transport.tensor_parallel.rank_connections import (
    FromRank,
    LeaderConnection,
    RankConnection,
    RankGone,
)
from ballast.transport.tensor_parallel.rank_messages import (
    DoneReply,
    JoinGroupMsg,
    LoadModelMsg,
    MapPagesMsg,
    MeetRanksMsg,
    RefusedReply,
    RunJobMsg,
    ToRank,
    TransferLandedEvent,
    UnmapPagesMsg,
)

WORK = SequenceWork("a", [1, 2, 3], 5, [7, 9], Sampling(), scoring=Scoring(6, [2, 3], 1))
ASKED: list[ToRank] = [
    JoinGroupMsg(1, DeviceSettings(budget_bytes=1 << 20, tensor_parallel=2), LinkRates.even(1e9)),
    MeetRanksMsg(None),
    LoadModelMsg(ModelSettings(name="m", path="p"), 2),
    MapPagesMsg(1 << 40, 3, [5, 6], True, False),
    RunJobMsg("m", (WORK, WORK), True),
]

Pair = tuple[RankConnection, LeaderConnection]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    connection, there = RankConnection(ours), LeaderConnection(theirs.detach())
    yield connection, there
    connection.close()
    there._connection.close()


@pytest.mark.parametrize("asked", ASKED, ids=lambda m: type(m).__name__)
def test_messages_arrive_as_they_were(pair: Pair, asked: ToRank) -> None:
    here, there = pair
    here.send(asked)
    assert there.receive() == asked
    said: FromRank = TransferLandedEvent(TransferDoneEvent(4, 10, 0.5, "torn"))
    there.send(said)
    assert here.receive() == said


def test_a_refusal_is_raised_where_it_was_asked(pair: Pair) -> None:
    here, there = pair

    def refuse() -> None:
        for call in ("mmap", None):
            there.receive()
            there.send(RefusedReply(call, "no room"))

    thread = threading.Thread(target=refuse)
    thread.start()
    with pytest.raises(DeviceError, match="mmap: no room"):
        here.call(UnmapPagesMsg(0, 0, 1))
    with pytest.raises(BrokenPromise, match="no room"):
        here.call(UnmapPagesMsg(0, 0, 1))
    thread.join()


def test_a_descriptor_comes_between_messages(pair: Pair) -> None:
    here, there = pair
    read, write = os.pipe()
    here.send(UnmapPagesMsg(1, 2, 3))
    here.send_descriptor(write)
    os.close(write)
    here.send(UnmapPagesMsg(4, 5, 6))
    assert there.receive() == UnmapPagesMsg(1, 2, 3)
    os.write(taken := there.receive_descriptor(), b"x")
    assert os.read(read, 1) == b"x"
    assert there.receive() == UnmapPagesMsg(4, 5, 6)
    os.close(taken)
    os.close(read)


def test_an_end_is_noticed_at_the_other(pair: Pair) -> None:
    here, there = pair
    there.send(DoneReply())
    here.close()
    with pytest.raises(RankGone):
        there.receive()
    with pytest.raises(RankGone):
        there.send(DoneReply())


def test_what_follows_no_schema_is_refused() -> None:
    ours, theirs = socket.socketpair()
    connection = RankConnection(ours)
    theirs.sendall(b"\0\0\0\x01\x90")
    with pytest.raises(MalformedMessage):
        connection.receive()
    connection.close()
    theirs.close()
