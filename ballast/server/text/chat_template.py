"""Render chat templates in child processes that can be killed.

A template is a program that came with a checkpoint. Jinja's sandbox keeps it from files and from
Python's internals, but not from endless loops or unbounded texts. So each runs in a child process
(`chat_template_child`) with limits of processor time and memory
(docs/decisions/023-templates-in-a-child.md).

::

    server ── connection ──> process with transformers loaded ── fork ──> child
    server <── conversations, texts ──> child                    killed: the next one is forked
    server ── number of a child that nobody waits for any more ──> the same process kills it
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Hashable
from contextlib import suppress
from weakref import WeakValueDictionary

from ballast.core.errors import InvalidRequest, Unavailable
from ballast.isolation.environment import child_environment
from ballast.server.http.fair_turns import FairTurns
from ballast.server.text.template_messages import (
    BROKEN,
    FORK,
    KILL,
    LENGTH,
    NUMBER_BYTES,
    REFUSED,
    TEXT,
    TOO_MUCH,
    EncodedJob,
    framed,
    refused,
)
from ballast.server.text.template_traits import TemplateTraits

log = logging.getLogger(__name__)

CPU_SECONDS = 2.0
"""Most processor time for one conversation, in seconds; a conversation of eight megabytes takes a
tenth of it."""
WALL_SECONDS = 60.0
"""Most wall-clock seconds for one conversation: a child that is stopped must not block its clients
for ever. It is no fault of the template's, which processor time bounds: another child is asked."""
TRIES = 2
"""Children that are asked for one conversation."""
MEMORY_BYTES = 1 << 30
"""Most address space of a child, in bytes; Python and the loaded modules take a fifth."""
CHILDREN = 2
"""Most templates that are rendered at a time. Each template has one child at most, so that a bad
one does not occupy all."""


class TemplateTooCostly(InvalidRequest):
    """Rendering took more time or memory than allowed."""


class TemplateBroken(InvalidRequest):
    """The template does not parse."""


class TemplateRenderer:
    """Renders chat templates in child processes, which start when first needed.

    Use it on one event loop.
    """

    def __init__(self, cpu_seconds: float = CPU_SECONDS, memory_bytes: int = MEMORY_BYTES) -> None:
        self._limits = (str(cpu_seconds), str(memory_bytes))
        self._parent: asyncio.subprocess.Process | None = None
        """Process that children are forked from."""
        self._control: socket.socket | None = None
        """Socket to the forking process, for connections, one for each child, and for numbers of
        children to kill."""
        self._forks = 0
        """Number of children that `_parent` has forked so far."""
        self._answered = False
        """Whether one of them has answered."""
        self._starting = asyncio.Lock()
        self._free = asyncio.Semaphore(CHILDREN)
        self._idle: list[_Child] = []
        self.traits: dict[Hashable, TemplateTraits] = {}
        """What is known of templates: models share them, and each is tried once."""
        self._turns: WeakValueDictionary[str, FairTurns] = WeakValueDictionary()
        """Turns by template, held while it is rendered."""

    async def render(self, job: EncodedJob, key: str = "") -> str:
        """Render a conversation as text when it is the turn of the API key named `key`.

        Raises InvalidRequest where the template refuses it, TemplateTooCostly, TemplateBroken, and
        Unavailable where no child can be started.
        """
        turns = self._turns.setdefault(job.template, FairTurns())
        async with turns.turn(key), self._free:
            reply = await self._reply(job.json)
        kind, text = reply[:1], reply[1:].decode()
        if kind == TEXT:
            return text
        if kind == REFUSED:
            raise refused(text)
        if kind == BROKEN:
            why = "the model's chat template does not parse"
            raise TemplateBroken(f"{why}: {text}; use /v1/completions, or repair it", "messages")
        raise _too_costly()

    async def prepare(self) -> None:
        """Start the forking process, which begins to load `transformers`: seconds of processor
        time. Raises Unavailable."""
        async with self._starting:
            if self._control is None:
                await self._start()

    async def close(self) -> None:
        """End all children."""
        for child in self._idle:
            child.close()
        self._idle.clear()
        await self._end()  # ends the children that still render, too

    async def _reply(self, question: bytes) -> bytes:
        """Return the reply of a child, or of another one where the first has none in time."""
        for _ in range(TRIES):
            with suppress(TimeoutError):
                return await self._ask(question)
            log.warning("a chat template's child has not answered for %g s", WALL_SECONDS)
        raise _too_costly()

    async def _ask(self, question: bytes) -> bytes:
        """Return a child's reply. Raises TimeoutError where it has none in time."""
        child = await self._acquire()
        try:
            async with asyncio.timeout(WALL_SECONDS):
                reply = await child.ask(question)
        except TimeoutError:
            self._kill(child)
            if child.parent is self._parent and not self._answered:
                await self._end()  # it may have forked none
            raise
        except (OSError, EOFError) as error:
            self._kill(child)
            await self._check_parent()
            raise _too_costly() from error
        except BaseException:  # the client left; its job must not go on
            self._kill(child)
            raise
        self._answered = True
        if reply[:1] == TOO_MUCH:
            self._kill(child)  # give its memory back
        else:
            self._idle.append(child)
        return reply

    async def _acquire(self) -> _Child:
        """Return an idle child, or a new one."""
        while self._idle:
            child = self._idle.pop()
            if child.lives:
                return child
            child.close()
        async with self._starting:
            if self._control is None:
                await self._start()
            try:
                return await self._forked()
            except OSError as error:
                await self._end()
                raise Unavailable(f"chat templates cannot be rendered now: {error}") from error

    async def _forked(self) -> _Child:
        assert self._control is not None
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [FORK], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        self._forks += 1
        number, parent = self._forks, self._parent
        return _Child(number, parent, *await asyncio.open_unix_connection(sock=ours))

    def _kill(self, child: _Child) -> None:
        child.close()
        if self._control is not None and child.parent is self._parent:
            with suppress(OSError):  # the parent is gone, and its children with it
                self._control.send(KILL + child.number.to_bytes(NUMBER_BYTES, "big"))

    async def _start(self) -> None:
        quiet = {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
        # SEQPACKET keeps the bounds of messages: each is read alone.
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        with theirs:
            fd = theirs.fileno()
            command = ("-m", "ballast.server.text.chat_template_child", str(fd), *self._limits)
            try:
                self._parent = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(fd,),
                    env=child_environment(quiet),
                )
            except OSError as error:
                await self._end()
                raise Unavailable(f"chat templates cannot be rendered now: {error}") from error

    async def _check_parent(self) -> None:
        """Raise Unavailable if the forking process has ended, and its children with it."""
        if self._parent is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                code = await self._parent.wait()
                await self._end()
                raise Unavailable(f"what renders chat templates ended with code {code}")

    async def _end(self) -> None:
        parent, self._parent = self._parent, None
        control, self._control = self._control, None
        self._forks, self._answered = 0, False
        if control is not None:
            control.close()
        if parent is not None:
            with suppress(ProcessLookupError):
                parent.kill()
            await parent.wait()


class _Child:
    """Connection to one child; `number` counts the children of its `parent`, from 1."""

    def __init__(
        self,
        number: int,
        parent: asyncio.subprocess.Process | None,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.number, self.parent = number, parent
        self._reader, self._writer = reader, writer

    @property
    def lives(self) -> bool:
        return not self._reader.at_eof()

    async def ask(self, question: bytes) -> bytes:
        """Send a job, and return the reply. Raises OSError or EOFError where the child has
        ended."""
        self._writer.write(framed(question))
        await self._writer.drain()
        size = int.from_bytes(await self._reader.readexactly(LENGTH), "big")
        return await self._reader.readexactly(size)

    def close(self) -> None:
        """Close the connection: the child ends when it is idle, or when its time is up."""
        self._writer.close()


def _too_costly() -> TemplateTooCostly:
    return TemplateTooCostly(
        f"the model's chat template takes more than {CPU_SECONDS:g} seconds or "
        f"{MEMORY_BYTES >> 20} MiB for these messages; use /v1/completions, or repair it",
        "messages",
    )
