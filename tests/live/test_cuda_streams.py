"""Which multiprocessors the lanes of a GPU have, over the driver's stand-in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ballast.core.errors import DeviceError
from ballast.core.job import Job
from ballast.core.settings import DeviceSettings
from ballast.engine.lanes import Lanes
from ballast.live.cuda_streams import GreenStreams, PlainStreams, lane_streams
from tests.memory.fake_cuda import FakeDriver


def entered(driver: FakeDriver) -> FakeDriver:
    driver.set_current(driver.retain_context(0))
    return driver


def groups_of(driver: FakeDriver, stream: int, lanes: int) -> set[int]:
    context = driver.green_streams.get(stream)
    if context is None:
        return set(range(lanes))
    _, first, n = driver.greens[context]
    return set(range(first, first + n))


@given(st.integers(2, 5), st.data())
def test_jobs_at_the_same_time_have_different_multiprocessors(n: int, data: st.DataObject) -> None:
    driver = entered(FakeDriver())
    lanes = Lanes(DeviceSettings(name="cuda:0", budget_bytes=0, lanes=n))
    streams = lane_streams(driver, 0, n)
    running: dict[int, tuple[Job, set[int]]] = {}
    for id in range(30):
        if running and data.draw(st.booleans()):
            job, _ = running.pop(data.draw(st.sampled_from(sorted(running))))
            streams.release(job)
            lanes.end(job)
        if not lanes.ready:
            continue
        lane, parts = lanes.place(data.draw(st.integers(0, 3)))
        job = Job(id, lane, "m", (), parts)
        lanes.begin(job)
        groups = groups_of(driver, streams.acquire(job), n)
        assert groups
        assert parts is None or len(groups) <= parts
        assert all(groups.isdisjoint(other) for _, other in running.values())
        if not running:
            assert len(groups) == parts
        running[id] = job, groups
    streams.close()
    driver.release_context(0)
    assert driver.is_clean()


def test_where_parts_cannot_be_had_lanes_have_streams_alone() -> None:
    failures = [(None, 0, 9), ("split", 0, 2), ("green_context", 1, 2), ("record", 1, 2)]
    for call, after, n in (*failures, ("wait", 1, 2), ("new_event", 2, 2)):
        driver = entered(FakeDriver())
        if call is not None:
            driver.fail(call, after=after, error=DeviceError(call, "not here"))
        streams = lane_streams(driver, 0, n)
        assert isinstance(streams, PlainStreams)
        assert len(streams.all) == n
        assert not driver.greens
        streams.close()
        driver.release_context(0)
        assert driver.is_clean()


def test_an_event_is_recorded_on_every_green_stream_before_it_is_used() -> None:
    driver = entered(FakeDriver())
    streams = lane_streams(driver, 0, 3)
    assert isinstance(streams, GreenStreams)
    assert driver.calls.count("record") == driver.calls.count("wait") == len(streams.all) == 6
    assert not driver.events
    streams.close()
    driver.release_context(0)
    assert driver.is_clean()


def test_one_lane_needs_no_parts() -> None:
    driver = entered(FakeDriver())
    streams = lane_streams(driver, 0, 1)
    assert not isinstance(streams, GreenStreams)
    assert len(streams.all) == 1
    streams.close()
