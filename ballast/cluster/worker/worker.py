"""Pass messages between the server's socket and the device, on the worker process's main thread.

Run by `worker.process`. The device's loop is on another thread (`DeviceThread`): messages become
events in its inbox, and its outputs come back through the outgoing queue.
"""

from __future__ import annotations

import logging
import os

from ballast.cluster.lending.lending_peers import LendingPeers
from ballast.cluster.segment_broker import SegmentClient
from ballast.cluster.worker.device_thread import DeviceThread, MakeDevice, Record
from ballast.cluster.worker.outgoing_queue import OutgoingQueue
from ballast.cluster.worker.process_names import SERVING, name_process
from ballast.cluster.worker.status_reporter import (
    HEARTBEAT_SECONDS,
    REPORT_SECONDS,
    StatusReporter,
)
from ballast.core.clock import Clock
from ballast.core.command import CommandOutcome
from ballast.core.event import (
    ArrivalEvent,
    CancelEvent,
    DrainEvent,
    PauseEvent,
    ResumeEvent,
    StopEvent,
)
from ballast.transport.sockets import WorkerSocket
from ballast.transport.worker_messages.admin_messages import CommandDoneMsg, CommandMsg
from ballast.transport.worker_messages.codec import ToWorker
from ballast.transport.worker_messages.lending_messages import (
    LeaseMsg,
    MeetPeerMsg,
    PeerEndedMsg,
    lending_message,
)
from ballast.transport.worker_messages.lifecycle_messages import (
    ConfigureMsg,
    DrainMsg,
    HelloMsg,
    StopMsg,
)
from ballast.transport.worker_messages.migration_messages import MigrationOrderMsg
from ballast.transport.worker_messages.request_messages import (
    FlowControlMsg,
    SubmitMsg,
    WithdrawMsg,
)


class Worker:
    """Receives the server's messages for the device, and sends the device's messages and status."""

    def __init__(
        self,
        socket: WorkerSocket,
        make_device: MakeDevice,
        record: Record,
        clock: Clock,
        segments: SegmentClient | None = None,
    ) -> None:
        """`segments`: shares weights with other workers; None: nothing is shared."""
        self._socket = socket
        self._outgoing = outgoing = OutgoingQueue()
        self._device = DeviceThread(make_device, record, clock, outgoing, segments)
        self._peers = LendingPeers(
            self._device.use, lambda word: outgoing.put(lending_message(word))
        )
        self._reporter = StatusReporter(socket.send, self._device, clock)

    def run(self) -> int:
        """Serve until the device's loop has returned and all messages are sent, or the connection
        to the server is lost: requests then go on elsewhere, and nobody hears of them here.

        Returns the exit code of the process.
        """
        socket, device = self._socket, self._device
        socket.also_wake_on(self._outgoing.fd)
        socket.also_wake_on(self._peers.socket.fileno())
        socket.send(HelloMsg(os.getpid()))
        while not device.abandoned and not socket.lost:
            # Read before the queue is emptied: messages of an ended thread are in the queue.
            ended = device.ended
            self._send_outgoing()
            if ended:
                break
            self._reporter.report()
            if device.serves:
                self._peers.serve_pages()
            if device.started:
                self._reporter.beat()  # a spare is not watched
            socket.wait(REPORT_SECONDS if device.serves else HEARTBEAT_SECONDS)
            socket.receive_all(self._handle)
        return device.exit_code

    def _send_outgoing(self) -> None:
        messages = self._outgoing.drain()
        if any(isinstance(message, CommandDoneMsg) for message in messages):
            # Before the answer: its receiver then sees the change in the device's state.
            self._reporter.report(at_once=True)
        for message in messages:
            self._socket.send(message)

    def _handle(self, message: ToWorker) -> None:
        match message:
            case ConfigureMsg():
                logging.getLogger("ballast").setLevel(message.log_level)
                name_process(SERVING)
                self._device.start(message.fleet, self._peers.socket.address)
            case SubmitMsg():
                for submission in message.unwrap():
                    self._device.post(ArrivalEvent(submission))
            case WithdrawMsg():
                for request_id in message.request_ids:
                    self._device.post(CancelEvent(request_id))
            case FlowControlMsg():
                for request_id in message.paused:
                    self._device.post(PauseEvent(request_id))
                for request_id in message.resumed:
                    self._device.post(ResumeEvent(request_id))
            case DrainMsg():
                self._device.post(DrainEvent())
            case StopMsg():
                self._device.post(StopEvent(message.reason))
            case CommandMsg():
                self._command(message)
            case MeetPeerMsg():
                self._peers.meet(message)
            case PeerEndedMsg():
                self._peers.forget(message)
            case LeaseMsg():
                self._peers.handle(message.event)
            case MigrationOrderMsg():
                self._migrate(message)

    def _command(self, command: CommandMsg) -> None:
        def done(outcome: CommandOutcome) -> None:
            self._outgoing.put(CommandDoneMsg(command.id, outcome))

        with self._device.use() as device:
            if device is not None:
                device.command(command.order, done, command.by)
                return
        done(CommandOutcome("unavailable", "the device is not serving"))

    def _migrate(self, message: MigrationOrderMsg) -> None:
        with self._device.use() as device:
            if device is not None:
                device.migrate(message.order)
