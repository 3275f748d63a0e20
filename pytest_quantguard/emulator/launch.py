"""Starts and ends the emulator's process: port, log, signals, exit status.

The port is opened before the model is loaded, and health checks answer 503 until it is; a port in use ends
the process at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_quantguard.emulator.extra import explanation, missing_packages
from pytest_quantguard.emulator.options import EmulatorOptions, add_arguments, options_from
from pytest_quantguard.emulator.threads import claim_threads
from pytest_quantguard.errors import QuantguardError

if TYPE_CHECKING:
    import uvicorn

    from pytest_quantguard.emulator.running import RunningModel
    from pytest_quantguard.emulator.server import EmulatorServer

DRAIN_SECONDS = 2.0
"""How long running requests may go on after SIGTERM before they are aborted."""
STOP_SECONDS = 5
"""How long open connections may stay after that."""
BACKLOG = 512
READY = "The server is fired up and ready to roll!"


def run(argv: Sequence[str] | None = None) -> int:
    """Parse a command line and serve until SIGTERM or Ctrl-C; returns the exit status.

    0 after a signal, 1 when the server cannot start (the reason is the last line of the log), 2 for a wrong
    command line.
    """
    parser = argparse.ArgumentParser(
        prog="pytest_quantguard.emulator",
        description="A CPU server that speaks SGLang's protocol and computes quantized models bit-exactly.",
        allow_abbrev=False,
    )
    add_arguments(parser)
    return serve(options_from(parser.parse_args(argv)))


def serve(options: EmulatorOptions) -> int:
    """Serve until a signal; returns the exit status as `run` does."""
    options = replace(options, threads=claim_threads(options.threads))
    log = configure_log()
    missing = missing_packages()
    if missing:
        log.error(explanation(missing))
        return 1
    try:
        listening = listen(options.host, options.port)
    except OSError as error:
        log.error(
            f"port {options.port} on {options.host} cannot be used: {error.strerror}. "
            "Choose another with --port."
        )
        return 1
    from pytest_quantguard.emulator.server import EmulatorServer

    with listening:
        return asyncio.run(Process(options, EmulatorServer(options), log).run(listening))


class Process:
    """One serving process: loads the model beside the running HTTP server, and ends both."""

    def __init__(self, options: EmulatorOptions, server: EmulatorServer, log: logging.Logger) -> None:
        self._options = options
        self._server = server
        self._log = log
        self._stop = asyncio.Event()
        self._status = 0

    async def run(self, listening: socket.socket) -> int:
        """Serve until a signal or a failed start; returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_stop, number)
        http = http_server(self._server)
        serving = asyncio.ensure_future(http.serve(sockets=[listening]))
        threading.Thread(target=self._load, args=(loop,), name="emulator-load", daemon=True).start()
        await self._stop.wait()
        self._server.drain()
        await self._drained(loop)
        self._server.abort_all()
        http.should_exit = True
        await serving
        await self._server.close(STOP_SECONDS)
        return self._status

    def _asked_to_stop(self, number: int) -> None:
        self._log.info(f"{signal.Signals(number).name} received. Draining requests and shutting down...")
        if self._stop.is_set():
            self._server.abort_all()
        self._stop.set()

    async def _drained(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait until no sequence runs, but not for long."""
        end = loop.time() + DRAIN_SECONDS
        while self._server.busy and loop.time() < end:
            await asyncio.sleep(0.02)

    def _load(self, loop: asyncio.AbstractEventLoop) -> None:
        """Load the model, on a thread of its own."""
        from pytest_quantguard.emulator.running import load

        after: Callable[[], None] = self._failed
        try:
            running = load(self._options, self._log)
            after = functools.partial(self._ready, running)
        except QuantguardError as error:
            self._log.error(str(error))
        except Exception:
            self._log.exception("The model could not be loaded.")
        with contextlib.suppress(RuntimeError):  # the loop is closed: stopped while loading
            loop.call_soon_threadsafe(after)

    def _ready(self, running: RunningModel) -> None:
        self._server.serve(running)
        self._log.info(READY)

    def _failed(self) -> None:
        self._status = 1
        self._stop.set()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError when the port is taken."""
    # asyncio switches Nagle's algorithm off only on sockets that name TCP; left on, it costs 40 ms an answer.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # A port whose last connections are still in TIME_WAIT is free; one that somebody listens on is not.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def http_server(server: EmulatorServer) -> uvicorn.Server:
    """Uvicorn around the application, without signal handlers of its own."""
    import uvicorn

    from pytest_quantguard.emulator.bounded_http import BoundedHttpProtocol

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Signals are handled by Process; Uvicorn would raise them again when it has stopped."""
            yield

    config = uvicorn.Config(
        server.asgi,
        http=BoundedHttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=STOP_SECONDS,
        backlog=BACKLOG,
    )
    return Server(config)


def configure_log() -> logging.Logger:
    """Everything to stderr, a line each, flushed, with SGLang's time stamp."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter("[%(asctime)s] %(message)s", "%Y-%m-%d %H:%M:%S"))
    for name in ("pytest_quantguard.emulator", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logging.getLogger("pytest_quantguard.emulator")


class LineFormatter(logging.Formatter):
    """Marks Uvicorn's lines and errors by their level, as SGLang's log does."""

    def format(self, record: logging.LogRecord) -> str:
        """One record as text."""
        line = super().format(record)
        if record.name.startswith("uvicorn") or record.levelno >= logging.WARNING:
            stamp, _, message = line.partition("] ")
            return f"{stamp}] {record.levelname + ':':<9} {message}"
        return line
