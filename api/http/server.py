"""The server under the app: uvicorn with limits on connections, on slow clients and on its end."""

import asyncio
import gc
import os
import resource
import signal
import sys
import threading
from functools import partial
from types import FrameType
from typing import Any

import anyio
import h11
import uvicorn
from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from planner.api.errors import EXIT_BUG
from planner.api.settings import Settings

FILES_BESIDE = 200  # open files that are not connections: the database, probes, planning
MOST_FILES = 65_536
KEEP_ALIVE_SECONDS = 15
LINGER_SECONDS = 2.0  # for a sender to read its answer, with most of the body still to come
# SIGTERM: answers in flight may end, then what runs is put back, then the process ends anyhow
GRACE_SECONDS, LAST_SECONDS = 4, 9.0
SWITCH_SECONDS = 0.001  # a thread that computes lets the event loop run this often


class PatientProtocol(H11Protocol):
    """uvicorn's protocol, with a limit on how long a request's head may take to come.

    A client that sends half a request and waits holds a connection; so does one that opens
    thousands, and one that goes on sending a body after its answer. All are closed.
    """

    def __init__(self, *args: Any, head_seconds: float, most_connections: int, **more: Any) -> None:
        super().__init__(*args, **more)
        self.head_seconds, self.most_connections = head_seconds, most_connections
        self._waiting: asyncio.TimerHandle | None = None
        self._asked, self.app = self.app, self._answer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for a request."""
        super().connection_made(transport)
        if len(self.connections) > self.most_connections:
            transport.abort()
        else:
            self._wait()

    def data_received(self, data: bytes) -> None:
        """Goes on waiting until the head of a request is whole."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._wait()
        else:
            self._done()

    def connection_lost(self, exc: Exception | None) -> None:
        self._done()
        super().connection_lost(exc)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, and closes the connection where its body had not come by then.

        The sender may read the answer, sending on, for LINGER_SECONDS.
        """
        unread = False

        async def answer(message: Message) -> None:
            nonlocal unread
            if message["type"] == "http.response.start":
                unread = self.conn.their_state is h11.SEND_BODY
                if unread:
                    MutableHeaders(scope=message)["connection"] = "close"
            elif unread and not message.get("more_body", False):
                await send({**message, "more_body": True})
                with anyio.move_on_after(LINGER_SECONDS):
                    while (await receive()).get("more_body", False):
                        pass
                message = {"type": "http.response.body"}
            await send(message)

        await self._asked(scope, receive, answer)

    def _wait(self) -> None:
        if self._waiting is None:
            self._waiting = self.loop.call_later(self.head_seconds, self._too_slow)

    def _done(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _too_slow(self) -> None:
        self._waiting = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.abort()


class Server(uvicorn.Server):
    """uvicorn's server, which tells the app at once that it is to end, and ends in any case."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self.app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """No new probe starts, event streams end, and what hangs does not keep the process."""
        self.app.state.stopping.set()
        for workers in self.app.state.workers:
            workers.halt()
        last = threading.Timer(LAST_SECONDS, os._exit, (128 + signal.Signals(sig),))
        last.daemon = True
        last.start()
        super().handle_exit(sig, frame)


def serve(app: FastAPI, settings: Settings) -> int:
    """Serves until it is told to end. The exit code."""
    sys.setswitchinterval(SWITCH_SECONDS)
    protocol = partial(
        PatientProtocol,
        head_seconds=settings.request_seconds,
        most_connections=_most_connections(settings.most_connections),
    )
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=protocol,  # type: ignore[arg-type]
        ws="none",
        server_header=False,
        proxy_headers=bool(settings.proxies),
        forwarded_allow_ips=settings.proxies,
        access_log=False,  # `planner.api.http.metrics` writes it
        log_config=None,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    server = Server(config, app)
    gc.freeze()  # what is there now stays; to look through it takes a tenth of a second
    server.run()  # ends in KeyboardInterrupt after Ctrl-C
    return 0 if server.started else EXIT_BUG


def _most_connections(wanted: int) -> int:
    """Connections that the limit on open files leaves, which is raised as far as it goes."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MOST_FILES if most == resource.RLIM_INFINITY else min(most, MOST_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    return max(1, min(wanted, files - FILES_BESIDE))
