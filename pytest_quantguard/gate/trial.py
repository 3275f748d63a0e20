"""One config on trial: its server, its baseline and its measurements, each obtained once, when first needed.

Nothing here judges; `judge.py` does, and knows no servers. What could not be had is remembered with its
reason, so that everything that needs it fails with that reason and nothing is tried twice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar, cast

from pytest_quantguard.baseline.compatibility import Expectation, check_compatible
from pytest_quantguard.baseline.manifest import ModelRecord
from pytest_quantguard.baseline.recording import CellKey, Recording
from pytest_quantguard.baseline.remote import RemoteFolder, fetch, fetch_accepted
from pytest_quantguard.baseline.store import accepted_path, read_recording
from pytest_quantguard.caching import cache_folder
from pytest_quantguard.config import AttachServer, GateConfig
from pytest_quantguard.errors import (
    BaselineError,
    ConfigError,
    InvalidAnswerError,
    QuantguardError,
    RequestRejectedError,
    ServerError,
    ServerStartError,
)
from pytest_quantguard.gate.portable import portable_server
from pytest_quantguard.logprobs.divergence import Divergence
from pytest_quantguard.measure.cells import CellMeasurement, measure_cell
from pytest_quantguard.measure.comparison import CellComparison, compare_cells
from pytest_quantguard.measure.decode import DecodeChoice, choose_decode
from pytest_quantguard.measure.drift import require_same_texts
from pytest_quantguard.measure.identity import describe_model
from pytest_quantguard.prompts.suite import PromptSuite, load_suite
from pytest_quantguard.serving.launch import RunningServer, start

STILL_USABLE = (InvalidAnswerError, RequestRejectedError)
"""After these the server can be asked again; any other error of it ends the session's use of it."""

T = TypeVar("T")
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TrialOptions:
    """What the command line adds to a config.

    output: folder of this config's results and logs. worker: number of the xdist worker, 0 without.
    push: also store what is recorded at the URL of `baseline`. accepting: this run is to become the accepted
    one, or its times are to be added to those of that, so that it is not held against the last.
    """

    output: Path
    repeats: int = 1
    worker: int = 0
    push: bool = False
    accepting: bool = False


@dataclass(slots=True)
class Trial:
    """Lazy parts of one gate. Every method raises `QuantguardError` with the cause where its part cannot be
    had.
    """

    config: GateConfig
    config_path: Path
    options: TrialOptions
    progress: Progress
    started: datetime = field(default_factory=lambda: datetime.now(timezone.utc))
    _had: dict[Hashable, Any] = field(default_factory=dict)
    _failed: dict[Hashable, QuantguardError] = field(default_factory=dict)
    _told: dict[str, str] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)
    notes: list[str] = field(default_factory=list)

    @property
    def capture_command(self) -> str:
        """What records the baseline."""
        push = "" if self.remote_baseline() is None else " --push"
        return f"quantguard capture {self.config_path}{push}"

    @property
    def accept_command(self) -> str:
        """What stores an accepted run."""
        push = "" if self.remote_baseline() is None else " --quantguard-push"
        return f"pytest --quantguard-config={self.config_path} --quantguard-accept{push}"

    @property
    def add_times_command(self) -> str:
        """What adds a run to the accepted times."""
        push = "" if self.remote_baseline() is None else " --push"
        return f"quantguard accept {self.config_path} --add-times{push}"

    @property
    def server_log(self) -> Path:
        """Where the candidate's output goes."""
        return self.options.output / "server.log"

    def suite(self) -> PromptSuite:
        """The prompts that the config asks for."""
        return self.once("suite", lambda: load_suite(self.config.suite, base_folder=self.config_path.parent))

    def baseline(self) -> Recording:
        """The stored recording of the reference, checked to belong to this config."""
        return self.once("baseline", self._read_baseline)

    def server(self) -> RunningServer:
        """The candidate, started on first use."""
        return self.once("server", self._start)

    def reference_server(self) -> RunningServer:
        """The reference beside the candidate, started on first use."""
        return self.once("reference", self._start_reference)

    @contextmanager
    def reference_alone(self) -> Iterator[RunningServer]:
        """The reference while the candidate is stopped, which starts anew when it is next needed."""
        running = self.running_server()
        if running is not None:
            self.progress("stopping the candidate, so that the reference has the device")
            running.stop()
            del self._had["server"]
        server = self._start_reference()
        try:
            yield server
        finally:
            server.stop()

    def decode_choice(self) -> DecodeChoice:
        """How decode is measured on this server."""
        return self.once(
            "decode", lambda: choose_decode(self.config.suite.decode_mode, self.server().capabilities)
        )

    def measurement(self, key: CellKey, *, warm: bool = False, repeat: int = 0) -> CellMeasurement:
        """The candidate's answers for one cell; `repeat` counts further measurements of the same."""
        return self.once(("cell", key, warm, repeat), lambda: self._measure(key, warm=warm))

    def comparison(self, key: CellKey, *, warm: bool = False, repeat: int = 0) -> CellComparison:
        """The candidate against the baseline, in one cell."""

        def compared() -> CellComparison:
            return compare_cells(
                self.baseline().cells[key], self.measurement(key, warm=warm, repeat=repeat).cell
            )

        return self.once(("comparison", key, warm, repeat), compared)

    def model_record(self) -> ModelRecord:
        """Who is on trial, as recordings say it."""
        vocab_size = next(iter(self.baseline().cells.values())).rows[0].vocab_size
        candidate = portable_server(self.config.candidate, self.config_path.parent)
        return describe_model(candidate, self.server().capabilities, vocab_size=vocab_size)

    def remote_baseline(self) -> RemoteFolder | None:
        """The folder at the URL of `baseline`; None where it is a folder of this machine."""
        location = self.config.baseline
        return RemoteFolder.parse(location) if isinstance(location, str) else None

    def baseline_folder(self) -> Path:
        """The folder of the baseline; of a remote one the copy in the cache, fetched now if need be."""
        return self.once("baseline folder", self._fetch_baseline)

    def accepted_folder(self) -> Path:
        """Where the accepted run of this candidate is, or would be; of a remote one its copy of now."""
        return self.once("accepted folder", self._fetch_accepted)

    def accepted(self) -> Recording:
        """The accepted run of this candidate, checked to belong to the baseline."""
        return self.once("accepted", self._read_accepted)

    def once(self, part: Hashable, make: Callable[[], T]) -> T:
        """`make()`, the first time; afterwards what it returned, or the error it raised."""
        if part in self._failed:
            raise self._failed[part].with_traceback(None)
        if part not in self._had:
            try:
                self._had[part] = make()
            except QuantguardError as error:
                self._failed[part] = error
                if isinstance(error, ServerError) and not isinstance(error, STILL_USABLE):
                    self._failed["server"] = error
                raise
        return cast(T, self._had[part])

    def keep(self, part: Hashable, value: object) -> None:
        """Remember what was obtained elsewhere, in place of what is known of it."""
        self._had[part] = value

    def told(self, error: QuantguardError, test_id: str) -> str:
        """The first test that told of this error, by its text; which is `test_id` if none has."""
        return self._told.setdefault(str(error), test_id)

    def touched(self) -> bool:
        """Whether anything was asked of this trial."""
        return bool(self._had or self._failed)

    def measured(self) -> dict[tuple[CellKey, bool, int], CellMeasurement]:
        """(cell, warm, repeat) -> what has been measured so far."""
        return {cast(tuple[Any, ...], part)[1:]: value for part, value in self.known("cell").items()}

    def compared(self) -> dict[CellKey, Divergence]:
        """Divergence from BF16 of every cell that was compared so far, as first measured."""
        found = {}
        for part, comparison in self.known("comparison").items():
            _, key, warm, repeat = cast(tuple[Any, ...], part)
            if not warm and repeat == 0:
                found[key] = comparison.divergence
        return found

    def text(self, token_ids: Sequence[int]) -> str:
        """The tokens as text, by the server's tokenizer; as ids from its first refusal on."""
        server, text = self.running_server(), ""
        usable = "server" not in self._failed and not self.failures("text")
        if token_ids and server is not None and (usable or ("text", *token_ids) in self._had):
            with suppress(QuantguardError):  # Whoever asks tells of something else; ids say the same.
                text = self.once(("text", *token_ids), lambda: server.client.detokenize(token_ids))
        return text or " ".join(f"<{token}>" for token in token_ids)

    def known_baseline(self) -> Recording | None:
        """The baseline if it was read."""
        return cast(Recording | None, self._had.get("baseline"))

    def known_accepted(self) -> Recording | None:
        """The accepted run if it was read."""
        return cast(Recording | None, self._had.get("accepted"))

    def known(self, kind: str) -> dict[Hashable, Any]:
        """All parts of a kind that have been had so far: ("drift", key) is of kind "drift"."""
        return {
            part: value for part, value in self._had.items() if isinstance(part, tuple) and part[0] == kind
        }

    def failures(self, kind: str) -> dict[Hashable, QuantguardError]:
        """All parts of a kind that could not be had, with the reason."""
        return {
            part: error for part, error in self._failed.items() if isinstance(part, tuple) and part[0] == kind
        }

    def running_server(self) -> RunningServer | None:
        """The candidate if it was started."""
        return self._had.get("server")

    def close(self) -> None:
        """Stop the server; nothing can be measured afterwards."""
        self._failed.setdefault("server", ServerStartError(f"{self.config.name}: this session is over."))
        self._stack.close()

    def _fetch_baseline(self) -> Path:
        remote = self.remote_baseline()
        if remote is None:
            return Path(self.config.baseline)
        fetched = fetch(remote, cache_folder() / "baselines", self.progress)
        self.notes += [fetched.note] if fetched.note else []
        return fetched.folder

    def _fetch_accepted(self) -> Path:
        folder, remote = accepted_path(self.baseline_folder(), self.model_record()), self.remote_baseline()
        if remote is not None:
            note = fetch_accepted(remote.child(f"accepted/{folder.name}"), folder, self.progress)
            self.notes += [note] if note else []
        return folder

    def _read_baseline(self) -> Recording:
        path, suite = self.baseline_folder(), self.config.suite
        try:
            recording = read_recording(path)
        except BaselineError as error:
            said = str(error).replace("quantguard capture CONFIG", self.capture_command)
            raise BaselineError(said) from error
        reference = self.config.reference
        model_path = (
            None if reference is None or isinstance(reference, AttachServer) else reference.model_path
        )
        check_compatible(
            recording,
            Expectation(
                model_path=model_path if model_path and not Path(model_path).is_absolute() else None,
                suite_digest=self.suite().digest,
                score_tokens=suite.score_tokens,
                top_logprobs=suite.top_logprobs,
                batch_sizes=suite.batch_sizes,
                phases=suite.phases,
            ),
            path=self.config.baseline,
            command=self.capture_command,
        )
        return recording

    def _read_accepted(self) -> Recording:
        baseline, path = self.baseline(), self.accepted_folder()
        try:
            accepted = read_recording(path)
        except BaselineError as error:
            said = str(error).replace(" Record one with: quantguard capture CONFIG", "")
            raise BaselineError(
                f"{self.config.name}: drift is judged against an accepted run, and there is none that can "
                f"be used. {said}\nIf this candidate is as it should be, accept it: {self.accept_command}"
            ) from error
        require_same_texts(accepted, baseline)
        return accepted

    def _start(self) -> RunningServer:
        self.progress(f"starting the candidate ({self.config.candidate.backend})")
        server = self._stack.enter_context(
            start(
                self.config.candidate,
                log_path=self.server_log,
                worker=self.options.worker,
                progress=self.progress,
            )
        )
        self.progress("the candidate answers")
        return server

    def _start_reference(self) -> RunningServer:
        if self.config.reference is None:
            raise ConfigError(
                f"{self.config_path}: times are to be held against the reference, and there is no "
                "`reference`. Add the server of the unquantized model: "
                "reference: {backend: sglang, model_path: ..., dtype: bfloat16}."
            )
        self.progress(f"starting the reference ({self.config.reference.backend})")
        server = self._stack.enter_context(
            start(
                self.config.reference,
                log_path=self.options.output / "reference.log",
                worker=self.options.worker,
                progress=self.progress,
            )
        )
        self.progress("the reference answers")
        return server

    def _measure(self, key: CellKey, *, warm: bool) -> CellMeasurement:
        baseline, server = self.baseline(), self.server()
        server.check_alive()
        return measure_cell(
            server.client,
            baseline.prompts,
            key,
            top_logprobs=self.config.suite.top_logprobs,
            decode=self.decode_choice() if key.phase == "decode" else None,
            warm=warm,
            progress=self.progress,
        )
