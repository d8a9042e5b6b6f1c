"""Run the loop of one device: take events, ask policies, apply actions, start jobs, send outputs.

Used by live devices and by the simulator, which pass in clock, inbox and runner; the loop must
not depend on which of the two it runs in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ballast.core.clock import Clock
from ballast.core.event import CommandEvent, Event, Output, TimerEvent
from ballast.core.story import Story
from ballast.engine.commands import CommandEnded, CommandHandler
from ballast.engine.decider import MemoryDecider
from ballast.engine.dispatcher import ROUNDS, Dispatcher, Runner
from ballast.engine.events import handle
from ballast.engine.leaps import Leaps
from ballast.engine.return_borrowed import bring_near, return_borrowed
from ballast.engine.state import DeviceState
from ballast.engine.story_snapshot import snapshot
from ballast.policy.presets import Preset


class Inbox(Protocol):
    """Source of a loop's events: a queue when live, an event heap in virtual time."""

    def take(self, until: float | None) -> list[Event]:
        """Return the next events, in order; waits for one, at most until time `until`.

        Returns an empty list when `until` is reached without an event.
        """


class Loop:
    """One device's loop. Reads no clock and no queue but those passed in."""

    def __init__(
        self,
        state: DeviceState,
        preset: Preset,
        inbox: Inbox,
        runner: Runner,
        clock: Clock,
        outbox: Callable[[list[Output]], None],
        story: Story,
        command_ended: CommandEnded | None = None,
    ) -> None:
        """`outbox` receives outputs for clients; `command_ended` the result of each command."""
        self.state = state
        state.weights_in_place = preset.requires.in_place
        self.inbox = inbox
        self.clock = clock
        self.outbox = outbox
        self.story = story
        self.decider = MemoryDecider(state, preset, story)
        self.commands = CommandHandler(state, self.decider, story, command_ended)
        self.dispatcher = Dispatcher(state, runner, story, self.decider)
        self.leaps = Leaps(state, clock, self.dispatcher, story, self._end_turn)
        """Accounting of many decode steps at once; used by the simulator only."""
        self.turn_since: float | None = None
        """Time at which the present turn began; None while the loop waits for events."""
        self._unfilled = 0
        """`Pool.unfilled` as last recorded in the story."""

    @property
    def preset(self) -> Preset:
        """The policies that decide for this device."""
        return self.decider.preset

    def use_preset(self, preset: Preset) -> None:
        """Replace the policies from the next turn on; they start with their predecessors' memos."""
        self.decider.preset = preset
        self.state.weights_in_place = preset.requires.in_place

    def run(self) -> None:
        """Run turns until the device has drained or is stopped; all accepted requests have ended
        then."""
        self.begin()
        try:
            while not self.state.over:
                self.turn()
            self.end()
        finally:
            self.story.end_turn()

    def begin(self) -> None:
        """Start the story, and the first jobs, before the first turn."""
        self.state.now = now = self.clock.now()
        self.state.link_bytes_per_second = self.state.link.bytes_per_second
        for m in self.state.models.values():
            m.traffic = m.traffic.restarted(now)
        if self.story.whole:
            self.story.record_snapshot(now, snapshot(self.state, self.preset, self.story))
        outputs: list[Output] = []
        self._schedule(outputs)
        self._end_turn(outputs)

    def end(self) -> None:
        """Fail the requests and commands that are open, after the last turn."""
        outputs: list[Output] = []
        for m in self.state.models.values():
            reason = self.state.stopped or "the device has drained"
            outputs += self.state.fail_all(m, "unavailable", reason)
        why = self.state.stopped or "the device has drained"
        self.commands.give_up(why)
        if outputs:
            self.outbox(outputs)
        self.story.record_end(self.state.now, why, outputs)

    @property
    def until(self) -> float | None:
        """Time of the next turn if no event comes before; None: it waits for an event."""
        moments = (
            self.decider.wake_at,
            self.decider.reorder_at,
            self.decider.expires_at,
            self.state.queue_deadlines.next,
            self.state.lending.next,
        )
        return min((t for t in moments if t is not None), default=None)

    def turn(self) -> bool:
        """Run one turn: take events, handle them, schedule jobs, send outputs; returns whether
        there was an event, beyond the timer's."""
        events = self._take_events()
        outputs: list[Output] = []
        self._handle(events, outputs)
        n_handled = len(outputs)
        if self.commands.pending:
            self.commands.settle(outputs)
        lending = self.state.lending
        if not lending.alone:
            if lending.borrower.wanted():
                return_borrowed(self.state, self.story, self.preset.memory)
            bring_near(self.state)
        self._schedule(outputs)
        if not lending.alone:
            lending.answer()
        self.state.tiers.count_staged(self.state.models.values())
        self._end_turn(outputs[n_handled:])
        self.turn_since = None
        return any(not isinstance(event, TimerEvent) for event in events)

    def _take_events(self) -> list[Event]:
        """Wait for events and begin a turn; a `TimerEvent` is appended if `until` is reached."""
        until = self.until
        events = self.inbox.take(until)
        self.turn_since = self.state.now = now = self.clock.now()
        self.state.link_bytes_per_second = self.state.link.bytes_per_second
        if not events or (until is not None and now >= until):
            events = [*events, TimerEvent()]
        return events

    def _handle(self, events: list[Event], outputs: list[Output]) -> None:
        """Apply each event to the state, and record it with its outputs in the story."""
        now = self.state.now
        peers = self.state.lending.bytes_per_second
        self.story.record_link_rates(now, self.state.link_bytes_per_second, peers)
        for event in events:
            self.story.record_event(now, event)
            if isinstance(event, CommandEvent):
                self.commands.begin(event, outputs)
            else:
                of_event = handle(self.state, event)
                self.story.record_event_outputs(of_event)
                outputs += of_event

    def _schedule(self, outputs: list[Output]) -> None:
        """Ask policies, start the next jobs, and only then send the outputs of the last ones."""
        if self.state.asking:
            self.decider.decide(outputs)
            self.dispatcher.choice = None
        self.dispatcher.dispatch(outputs)
        resorts = 0
        while self.decider.stuck:
            # The last job may have ended what stood in the way of a remedy.
            self.dispatcher.choice = None
            if not self.decider.decide(outputs):
                resorts += 1
                self.decider.resolve_stuck(outputs, shared=resorts > ROUNDS)
                if self.state.lending.awaiting:
                    break
                self.decider.decide(outputs)
            self.dispatcher.dispatch(outputs)
        if outputs:
            self.outbox(outputs)
        self.state.migration.send_answers()

    def _end_turn(self, outputs: list[Output]) -> None:
        """Publish prices; record in the story the outputs of decisions, and the end of the
        turn."""
        story, state = self.story, self.state
        self.decider.publish()
        story.record_decision_outputs(state.now, outputs)
        if state.pool.unfilled != self._unfilled:
            self._unfilled = state.pool.unfilled
            story.record_stray(state.now, "the machine had no memory for pages that were free")
        story.end_turn()
