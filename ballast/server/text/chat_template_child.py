"""Load `transformers` once, and fork a child for each connection; a child renders chat templates.

The program that `chat_template` starts. A child renders one conversation after the other. The
kernel ends it where a template exceeds its processor time; the server then reads the end of its
connection. An idle child ends when its connection closes, and a busy one is killed at the server's
request. This process ends when the server closes its end of `control`, and all children with it.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import importlib.util
import os
import resource
import signal
import socket
import sys
from typing import Any

import msgspec
from jinja2 import TemplateSyntaxError

from ballast.isolation.confinement import confine
from ballast.isolation.orphan import die_with
from ballast.server.text.template_messages import (
    BROKEN,
    FORK,
    KILL,
    MOST_BYTES,
    NUMBER_BYTES,
    REFUSED,
    TEXT,
    TOO_MUCH,
    TemplateJob,
    framed,
    received,
)

_DECODER = msgspec.json.Decoder(TemplateJob)


def main(control_fd: int, cpu_seconds: float, memory_bytes: int) -> None:
    """Fork and kill children at the server's request, until the server closes its end."""
    render_jinja_template = _renderer()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the server
    gc.freeze()  # shared by all children: a collection would cause copies
    parent, forks = os.getpid(), 0
    children: dict[int, int] = {}
    """Process ids of children by number. They cannot be reused: only this process waits for its
    children."""
    with socket.socket(fileno=control_fd) as control:
        while True:
            message, fds, _, _ = socket.recv_fds(control, len(KILL) + NUMBER_BYTES, 1)
            if not message:
                return
            if message[:1] == FORK:
                forks += 1
                children[forks] = os.fork()
                if children[forks] == 0:
                    die_with(parent)
                    control.close()
                    _limit(memory_bytes)
                    confine()
                    _answer(socket.socket(fileno=fds[0]), render_jinja_template, cpu_seconds)
                    os._exit(0)
                os.close(fds[0])
            elif pid := children.get(int.from_bytes(message[1:], "big")):
                os.kill(pid, signal.SIGKILL)
            children = {n: pid for n, pid in children.items() if not _ended(pid)}


def _renderer() -> Any:
    """Import the renderer of `transformers` without the package's `__init__`, which takes a second
    of processor time to list the modules of all models."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    package: Any = importlib.util.module_from_spec(spec)
    package.__version__ = importlib.metadata.version("transformers")
    sys.modules["transformers"] = package
    try:
        module = importlib.import_module("transformers.utils.chat_template_utils")
    except (ImportError, AttributeError):  # of a version that needs more of its package
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]
        module = importlib.import_module("transformers.utils.chat_template_utils")
    return module.render_jinja_template


def _ended(pid: int) -> bool:
    """Whether a child has ended; if so, it is reaped."""
    return os.waitpid(pid, os.WNOHANG)[0] == pid


def _limit(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    for nothing in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(nothing, (0, 0))


def _answer(connection: socket.socket, render: Any, cpu_seconds: float) -> None:
    try:
        while (question := received(connection)) is not None:
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # SIGPROF ends the process
            reply = _reply(question, render)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.sendall(framed(reply))
    except OSError:
        pass  # the server has ended, or waits no longer


def _reply(question: bytes, render: Any) -> bytes:
    try:
        job = _DECODER.decode(question)
        [text], _ = render(
            conversations=[job.messages],
            tools=job.tools,
            chat_template=job.template,
            add_generation_prompt=job.add_generation_prompt,
            continue_final_message=job.continue_final_message,
            **job.variables,
        )
        data = text.encode()
    except MemoryError:
        return TOO_MUCH
    except TemplateSyntaxError as error:
        return BROKEN + f"line {error.lineno}: {error.message}"[:1000].encode(errors="replace")
    except Exception as error:  # noqa: BLE001  a template is code, and may raise anything
        return REFUSED + str(error)[:1000].encode(errors="replace")
    return TEXT + data if len(data) <= MOST_BYTES else TOO_MUCH


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
