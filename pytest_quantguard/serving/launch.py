"""From a server's config to a running, identified server, and back to nothing.

    with start(config.candidate, log_path=folder / "server.log") as server:
        server.client.generate(...)

SGLang, the emulator and servers that already run are used alike; they differ in the command only.
"""

from __future__ import annotations

import contextlib
import shlex
from functools import partial
from pathlib import Path
from types import TracebackType

from pytest_quantguard.config import AttachServer, ServerConfig
from pytest_quantguard.errors import ServerDiedError, ServerStartError
from pytest_quantguard.serving import gpu_memory
from pytest_quantguard.serving.answers import Capabilities
from pytest_quantguard.serving.attach import attach, check_same_server
from pytest_quantguard.serving.client import Client
from pytest_quantguard.serving.command import OWN_KEYS, SECRET, Launch, LaunchedConfig, mask, plan_launch
from pytest_quantguard.serving.log_reading import COMMAND_MARK, read_failure, read_log, tail
from pytest_quantguard.serving.ports import HeldPort, listener_of
from pytest_quantguard.serving.process import ServerProcess
from pytest_quantguard.serving.readiness import Progress, Startup, exit_text

KEPT_LOGS = 3


class RunningServer:
    """A server that answers, known to be the one that was asked for. A context manager that stops it.

    command: the exact command line with secrets masked; None for a server that was already running.
    seconds_to_ready: from launch to the first generated token.
    notes: what a reader of the results should know, such as several replicas behind one url.
    devices: its CUDA_VISIBLE_DEVICES; None where it has none, or was already running.
    """

    def __init__(
        self,
        client: Client,
        capabilities: Capabilities,
        *,
        log_path: Path,
        launch: Launch | None = None,
        process: ServerProcess | None = None,
        seconds_to_ready: float = 0.0,
        notes: tuple[str, ...] = (),
        gpu_before: gpu_memory.UsedBytes | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.client = client
        self.url = client.url
        self.capabilities = capabilities
        self.log_path = log_path
        self.command = launch.shown_command if launch is not None else None
        self.seconds_to_ready = seconds_to_ready
        self.notes = notes
        self.devices = launch.env.get("CUDA_VISIBLE_DEVICES") if launch is not None else None
        self._secrets = launch.secrets if launch is not None else ()
        self._process = process
        self._gpu_before = gpu_before or {}
        self._progress = progress
        client.transport.explain_death = self._death

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def check_alive(self) -> None:
        """Raise ServerDiedError where the server ended, or another one answers in its place."""
        death = self._death()
        if death is not None:
            raise ServerDiedError(death)
        if self._process is None:
            check_same_server(self.client, self.capabilities)

    def end_note(self) -> str | None:
        """That the server which we started ended by itself; for runs that needed it no more, too."""
        code = self._process.poll() if self._process is not None else None
        return None if code is None else f"the server ended with {exit_text(code)} before it was stopped"

    def cpu_seconds(self) -> float | None:
        """Processor seconds that the server has used; None for one that we did not start ourselves."""
        return self._process.cpu_seconds() if self._process is not None else None

    def stop(self) -> None:
        """End the server and every process of its tree, and see its GPU memory freed.

        An attached server is left alone. May be called twice. Memory that is not freed in time is told to
        `progress`: the next start may then fail for want of it.
        """
        self.client.close()
        if self._process is not None:
            self._process.stop()
            _await_freed_memory(self._gpu_before, self.devices, self._progress)
            self._gpu_before = {}

    def _death(self, wait: float = 0.0) -> str | None:
        """What is known of the server's end; None if it still runs after `wait` seconds."""
        code = self._process.wait(wait) if self._process is not None else None
        if code is None:
            return None
        log = mask(read_log(self.log_path), self._secrets)
        reading = read_failure(log)
        because = f"\nreading of the log: {reading.sentence}" if reading is not None else ""
        command = shlex.join(self.command or ())
        return (
            f"the server ended with {exit_text(code)} while it was in use{because}\ncommand: {command}\n"
            f"log: {self.log_path}; its end:\n{tail(log)}"
        )


def start(
    config: ServerConfig, *, log_path: Path, worker: int = 0, progress: Progress | None = None
) -> RunningServer:
    """Start the server of `config`, or attach to it, and return when it has generated a token.

    log_path: where its output goes; older logs are kept as log_path.1, .2, .3.
    worker: index of the xdist worker, which picks its entry of `devices`.
    progress: is told in a few words what the server is doing.
    Raises ServerStartError (with the command, the log's end and a reading of it), ConfigError, ServerErrors.
    """
    if isinstance(config, AttachServer):
        client, capabilities, notes = attach(config, progress)
        return RunningServer(client, capabilities, log_path=log_path, notes=notes)
    with HeldPort(config.port) as held:
        launch = plan_launch(config, port=held.port, worker=worker)
        _new_log(log_path, launch)
        devices = launch.env.get("CUDA_VISIBLE_DEVICES")
        gpu_before = gpu_memory.used_bytes(devices)
        process = ServerProcess(
            launch.command, env=launch.env, cwd=launch.cwd, log_path=log_path, secrets=launch.secrets
        )
        try:
            client, capabilities, seconds = _await(config, launch, process, log_path, progress)
        except BaseException:
            process.stop()
            _await_freed_memory(gpu_before, devices, progress)
            raise
    return RunningServer(
        client,
        capabilities,
        log_path=log_path,
        launch=launch,
        process=process,
        seconds_to_ready=seconds,
        notes=_ignored_arguments(launch, capabilities),
        gpu_before=gpu_before,
        progress=progress,
    )


def _await(
    config: LaunchedConfig, launch: Launch, process: ServerProcess, log_path: Path, progress: Progress | None
) -> tuple[Client, Capabilities, float]:
    """The client of the server once it is ready and identified, and the seconds that took."""
    client = Client(
        f"http://127.0.0.1:{launch.port}", api_key=config.api_key, request_timeout=config.request_timeout
    )
    startup = Startup(
        process,
        client.transport,
        log_path,
        timeout=config.startup_timeout,
        hard_limit=config.startup_hard_limit or 4 * config.startup_timeout,
        progress=progress,
        describe=shlex.join(launch.shown_command),
        mask=partial(mask, secrets=launch.secrets),
    )
    seconds = startup.wait()
    capabilities = client.probe()
    _check_identity(config, launch, process, capabilities)
    return client, capabilities, seconds


def _await_freed_memory(before: gpu_memory.UsedBytes, devices: str | None, progress: Progress | None) -> None:
    still_used = gpu_memory.wait_until_freed(before, devices)
    if still_used is not None and progress is not None:
        progress(still_used)


def _ignored_arguments(launch: Launch, found: Capabilities) -> tuple[str, ...]:
    """A note for every argument that the server reports with another value than it was given."""
    notes = []
    for flag, asked in launch.flags.items():
        name = flag.replace("-", "_")
        if flag in OWN_KEYS or SECRET.search(flag) or name not in found.server_args:
            continue
        reported = found.server_args[name]
        if asked != reported and str(asked) != str(reported):
            notes.append(mask(f"asked for {name}={asked}, the server reports {reported!r}", launch.secrets))
    return tuple(notes)


def _check_identity(
    config: LaunchedConfig, launch: Launch, process: ServerProcess, found: Capabilities
) -> None:
    """Raise ServerStartError unless the server that answers is the one that was started."""
    wrong = []
    listener = listener_of(launch.port)
    if config.command is None and listener is not None and not process.owns(listener.pid):
        wrong.append(f"process {listener.pid} listens on port {launch.port}, which we did not start")
    port = found.server_args.get("port")
    if config.command is None and isinstance(port, int) and port != launch.port:
        wrong.append(f"it says that its port is {port}, ours is {launch.port}")
    if found.model_path is not None and not same_model(found.model_path, config.model_path):
        wrong.append(f"it serves {found.model_path!r}, started was {config.model_path!r}")
    if wrong:
        raise ServerStartError(
            f"another server answers at port {launch.port}: {'; '.join(wrong)}. End the old one, or set "
            "`port`.\n"
            f"command: {shlex.join(launch.shown_command)}"
        )


def same_model(found: str, asked: str) -> bool:
    """Whether two model paths mean the same model: equal, of the same last name, or the same folder."""
    if found == asked or Path(found).name == Path(asked).name:
        return True
    with contextlib.suppress(OSError):
        return Path(found).resolve() == Path(asked).resolve()
    return False


def _new_log(path: Path, launch: Launch) -> None:
    """Keep the last logs and begin a new one with the command line."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for number in range(KEPT_LOGS, 0, -1):
            older = path.with_name(f"{path.name}.{number - 1}") if number > 1 else path
            if older.exists():
                older.replace(path.with_name(f"{path.name}.{number}"))
        path.write_text(f"{COMMAND_MARK}{shlex.join(launch.shown_command)}\n", encoding="utf-8")
    except OSError as error:
        raise ServerStartError(
            f"The server's log cannot be written to {path}: {error.strerror or error}. Free space or "
            "permissions there, or choose another folder with --quantguard-output=DIR."
        ) from error
