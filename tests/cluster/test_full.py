"""A full queue is known before the device is asked, and not one that has room."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from tests.cluster.fake_device import HOLD, SILENT
from tests.cluster.worker.test_worker import device, running, submission


def test_what_surely_is_too_much_is_known_at_once() -> None:
    async def scenario() -> None:
        async with running() as (controller, _):
            model = replace(controller.devices.specs["a"], max_waiting=2, max_running=1)
            streaming = controller.router.submit([submission("stream", HOLD)])
            await streaming.take()
            waiting = [controller.router.submit([submission(f"{i}", SILENT)]) for i in range(2)]
            assert not controller.devices.full(model), "one of them may run"
            waiting.append(controller.router.submit([submission("2", SILENT)]))
            assert controller.devices.full(model)
            waiting[0].close()
            assert not controller.devices.full(model)
            for output_stream in (streaming, *waiting):
                output_stream.close()

    asyncio.run(scenario())


def test_what_the_device_reports_counts_while_as_many_wait_here() -> None:
    async def scenario() -> None:
        async with running() as (controller, _):
            model = replace(controller.devices.specs["a"], max_waiting=2, max_running=9)
            report = controller.devices.report
            assert report is not None
            (result,) = report.models
            waiting = [controller.router.submit([submission(f"{i}", SILENT)]) for i in range(2)]
            device(controller).report = replace(report, models=(replace(result, waiting=2),))
            assert controller.devices.full(model)
            device(controller).report = replace(report, models=(replace(result, waiting=1),))
            assert not controller.devices.full(model)
            device(controller).report = replace(report, models=(replace(result, waiting=2),))
            waiting[0].close()  # the report is older than that
            assert not controller.devices.full(model)
            waiting[1].close()

    asyncio.run(scenario())
