"""Ranks get each other's parts, all of them and of this meeting, however fast any of them is."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ballast.core.errors import BrokenPromise
from ballast.kernels.meeting import Meeting

ROUNDS = 300


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_part_arrives_whole_and_in_time(ranks: int) -> None:
    fd = os.memfd_create("test")

    def part_of(rank: int, turn: int) -> torch.Tensor:
        n = 1 + turn * 7 % 50
        return torch.arange(3 * n, dtype=torch.float32).view(3, n) + 1000 * turn + 100_000 * rank

    def take_part(rank: int) -> int:
        meeting = Meeting(fd, rank, ranks, 4 * 3 * 50)
        right = 0
        for turn in range(ROUNDS):
            found = meeting.all_gather(part_of(rank, turn))
            right += all(torch.equal(found[r], part_of(r, turn)) for r in range(ranks))
        return right

    with ThreadPoolExecutor(ranks) as threads:
        assert list(threads.map(take_part, range(ranks))) == [ROUNDS] * ranks
    os.close(fd)


def test_what_does_not_fit_is_refused() -> None:
    fd = os.memfd_create("test")
    meeting = Meeting(fd, 0, 1, 4096)
    assert torch.equal(meeting.all_gather(torch.ones(1024)), torch.ones(1, 1024))
    for wrong in (torch.ones(1025), torch.ones(4, dtype=torch.float64)):
        with pytest.raises(BrokenPromise):
            meeting.all_gather(wrong)
    os.close(fd)
