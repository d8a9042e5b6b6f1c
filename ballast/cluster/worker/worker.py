"""Pass messages between the server's socket and the device, on the worker process's main thread.

Run by `worker.process`. The device's loop is on another thread (`DeviceThread`): messages become
events in its inbox, and its outputs come back through the outgoing queue.
"""

from __future__ import annotations

import logging
import os
from math import inf

from ballast.cluster.lending.lending_peers import LendingPeers
from ballast.cluster.segment_broker import SegmentClient
from ballast.cluster.worker.device_thread import DeviceThread, MakeDevice, Record
from ballast.cluster.worker.outgoing_queue import OutgoingQueue
from ballast.cluster.worker.process_names import SERVING, name_process
from ballast.cluster.worker.renewals import Renewals
from ballast.cluster.worker.server_orders import ServerOrders
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
from ballast.transport.worker_messages.codec import ToServer, ToWorker
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
    NotReadyMsg,
    StopMsg,
)
from ballast.transport.worker_messages.migration_messages import MigrationOrderMsg
from ballast.transport.worker_messages.request_messages import (
    FlowControlMsg,
    OutputsMsg,
    SubmitMsg,
    WithdrawMsg,
)

WORD_SECONDS = 10.0
"""Time for the host's agent to notice as well that the server is gone, after which a worker that
was not told so ends."""


class Worker:
    """Receives the server's messages for the device, and sends the device's messages and status."""

    def __init__(
        self,
        socket: WorkerSocket,
        make_device: MakeDevice,
        record: Record,
        clock: Clock,
        segments: SegmentClient | None = None,
        renewals: Renewals | None = None,
    ) -> None:
        """`segments`: shares weights with other workers; None: nothing is shared. `renewals`: word
        of further servers; None: the worker ends with its server."""
        self._socket, self._clock, self._renewals = socket, clock, renewals
        self._outgoing = outgoing = OutgoingQueue()
        self._device = DeviceThread(make_device, record, clock, outgoing, segments)
        self._peers = LendingPeers(
            self._device.use, lambda word: outgoing.put(lending_message(word))
        )
        self._orders = ServerOrders()
        self._resuming = False
        """Whether a further server waits until commands of the last one have ended."""

    def run(self) -> int:
        """Serve until the device's loop has returned and all messages are sent, or the connection
        to the server is lost: requests then go on elsewhere, and nobody hears of them here. Where
        the host keeps the device, its next server is served.

        Returns the exit code of the process.
        """
        try:
            while self._serve() and (socket := self._next_server()) is not None:
                self._socket = socket
        finally:
            self._socket.close()
        return self._device.exit_code

    def _serve(self) -> bool:
        """Serve the present server; return whether it is gone."""
        socket, device, renewals = self._socket, self._device, self._renewals
        socket.also_wake_on(self._outgoing.fd)
        socket.also_wake_on(self._peers.socket.fileno())
        if renewals is not None:
            socket.also_wake_on(renewals.fd)
        self._reporter = StatusReporter(socket.send, device, self._clock)
        socket.send(HelloMsg(os.getpid(), self._orders.fleet if device.serves else None))
        while not device.abandoned:
            if socket.lost or (renewals is not None and renewals.waiting):
                return True
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
        return False

    def _next_server(self) -> WorkerSocket | None:
        """Wait for the next server; return the connection to it, or None if this device is not kept
        for one."""
        renewals, device = self._renewals, self._device
        if renewals is None or not self._leave_server():
            return None
        self._socket.close(at_once=True)
        silent = 0.0
        while not device.ended and not renewals.ended and silent < WORD_SECONDS:
            began = self._clock.now()
            word = renewals.take(WORD_SECONDS, self._outgoing.fd)
            self._take_outgoing()
            if word is None:
                silent += self._clock.now() - began
            elif (place := word.place) is not None:
                return WorkerSocket(place)
            else:
                silent = -inf
        return None

    def _leave_server(self) -> bool:
        """End what the server has ordered; return whether the device can be kept for another. One
        on which KV lies in borrowed pages is not: its lenders would wait for them."""
        with self._device.use() as device:
            if device is None or device.snapshot().borrowed:
                return False
        self._orders.abandon(self._device.post)
        self._resuming = False
        return True

    def _resume(self) -> None:
        """Report to a further server what the device serves, once no command changes it."""
        self._resuming = self._orders.changing
        if self._resuming:
            return
        epoch = self._peers.forget_all()
        fleet = self._orders.fleet
        ready = None if fleet is None else self._device.ready(fleet.models, epoch)
        self._socket.send(ready or NotReadyMsg("its device has ended"))

    def _take_outgoing(self) -> list[ToServer]:
        """Return the messages for the present server."""
        messages: list[ToServer] = []
        for message in self._outgoing.drain():
            if isinstance(message, OutputsMsg):
                self._orders.answered(message)
            if isinstance(message, CommandDoneMsg):
                answer = self._orders.done(message)
                messages += [] if answer is None else [answer]
            else:
                messages.append(message)
        return messages

    def _send_outgoing(self) -> None:
        messages = self._take_outgoing()
        if any(isinstance(message, CommandDoneMsg) for message in messages):
            # Before the answer: its receiver then sees the change in the device's state.
            self._reporter.report(at_once=True)
        for message in messages:
            self._socket.send(message)
        if self._resuming:
            self._resume()

    def _handle(self, message: ToWorker) -> None:
        match message:
            case ConfigureMsg():
                self._configure(message)
            case SubmitMsg():
                self._orders.submitted(message)
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

    def _configure(self, message: ConfigureMsg) -> None:
        logging.getLogger("ballast").setLevel(message.log_level)
        if self._device.started:
            self._resume()
            return
        name_process(SERVING)
        self._orders.fleet = message.fleet
        self._device.start(message.fleet, self._peers.socket.address)

    def _command(self, command: CommandMsg) -> None:
        number = self._orders.commanded(command)

        def done(outcome: CommandOutcome) -> None:
            self._outgoing.put(CommandDoneMsg(number, outcome))

        with self._device.use() as device:
            if device is not None:
                device.command(command.order, done, command.by)
                return
        done(CommandOutcome("unavailable", "the device is not serving"))

    def _migrate(self, message: MigrationOrderMsg) -> None:
        self._orders.migrates(message.order)
        with self._device.use() as device:
            if device is not None:
                device.migrate(message.order)
