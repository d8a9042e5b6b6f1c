"""Quotas in virtual time, and when to come again."""

from __future__ import annotations

import pytest

from ballast.core.clock import VirtualClock
from ballast.core.settings import KeySettings
from ballast.server.access.queue_pace import QueuePace
from ballast.server.access.quotas import KeyQuotas
from ballast.server.http.faults import Fault


def test_requests_are_refilled_steadily() -> None:
    clock = VirtualClock()
    quotas = KeyQuotas(clock)
    key = KeySettings(name="k", key="s", requests_per_minute=2)
    for _ in range(2):
        with quotas.request(key):
            pass
    with pytest.raises(Fault) as caught, quotas.request(key):
        pass
    assert caught.value.retry_after == pytest.approx(30)
    clock.advance_to(30)
    with quotas.request(key):
        pass


def test_a_prompt_longer_than_the_quota_waits_for_a_full_bucket_and_leaves_a_debt() -> None:
    clock = VirtualClock()
    quotas = KeyQuotas(clock)
    key = KeySettings(name="k", key="s", tokens_per_minute=60)
    quotas.prompt(key, 90)
    quotas.output(key, 30)
    with pytest.raises(Fault) as caught:
        quotas.prompt(key, 10)
    assert caught.value.retry_after == pytest.approx(70)
    clock.advance_to(70)
    quotas.prompt(key, 10)


def test_open_requests_are_counted_until_they_end() -> None:
    quotas = KeyQuotas(VirtualClock())
    key = KeySettings(name="k", key="s", concurrent=1)
    with quotas.request(key), pytest.raises(Fault), quotas.request(key):
        pass
    with quotas.request(key):
        pass


def test_a_lowered_limit_holds_at_once() -> None:
    quotas = KeyQuotas(VirtualClock())
    quotas.prompt(KeySettings(name="k", key="s", tokens_per_minute=100), 1)
    lowered = KeySettings(name="k", key="s", tokens_per_minute=10)
    quotas.prompt(lowered, 10)
    with pytest.raises(Fault):
        quotas.prompt(lowered, 1)


def test_retry_after_is_the_queue_over_its_recent_rate() -> None:
    clock = VirtualClock()
    pace = QueuePace(clock)
    assert (pace.retry_after(0), pace.retry_after(5)) == (1, 60)
    for second in range(20):
        clock.advance_to(second)
        pace.ended()
    clock.advance_to(20)
    assert pace.retry_after(10) == pytest.approx(10)
    assert pace.retry_after(1000) == 60
    clock.advance_to(100)
    assert pace.retry_after(10) == 60
