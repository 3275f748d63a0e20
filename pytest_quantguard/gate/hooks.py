"""The hooks of a session that has gates. They only delegate: state is in `session.py`, tests are in
`items.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from pytest_quantguard.errors import ConfigError
from pytest_quantguard.gate.header import header_lines
from pytest_quantguard.gate.items import BrokenGate, CheckItem, Errand, Gate, GateItem
from pytest_quantguard.gate.plan import Check, plan_checks
from pytest_quantguard.gate.termination import Termination
from pytest_quantguard.gate.verdicts import without_figures
from pytest_quantguard.paths import shown_path, with_short_paths
from pytest_quantguard.report.annotations import workflow_commands
from pytest_quantguard.report.headline import bound_text, figure
from pytest_quantguard.report.progress import ThrottledLines, seconds_between
from pytest_quantguard.report.terminal import render
from pytest_quantguard.report.visible import visible
from pytest_quantguard.report.wrapping import fitted, text_width
from pytest_quantguard.results import NOT_RUN, CheckResult, Outcome, RunResult
from pytest_quantguard.session import DEFAULT_OUTPUT, SESSION, GateSession, SessionOptions

PUBLISHED = "quantguard"
STORING = ("quantguard_update_baseline", "quantguard_accept", "quantguard_add_times")
"""Options that store something instead of judging against it; one at a time."""
DISTRIBUTIONS = ("load", "worksteal")


def start_session(config: pytest.Config) -> None:
    """Put a `GateSession` on the stash and register the hooks; decide what else is collected."""
    repeats = config.getoption("quantguard_repeats")
    if repeats is not None and repeats < 1:
        raise pytest.UsageError(f"--quantguard-repeats={repeats}: at least 1 is needed.")
    storing = [flag for flag in STORING if config.getoption(flag)]
    if len(storing) > 1:
        raise pytest.UsageError(f"{' and '.join(map(_as_typed, storing))} exclude each other.")
    push = config.getoption("quantguard_push")
    if push and not storing:
        raise pytest.UsageError(f"--quantguard-push needs {' or '.join(map(_as_typed, STORING))}.")
    invoked_in = config.invocation_params.dir
    options = SessionOptions(
        config_paths=tuple(Path(path) for path in config.getoption("quantguard_config")),
        output=invoked_in / (config.getoption("quantguard_output") or DEFAULT_OUTPUT),
        repeats=repeats or 1,
        accept=config.getoption("quantguard_accept"),
        add_times=config.getoption("quantguard_add_times"),
        update_baseline=config.getoption("quantguard_update_baseline"),
        push=push,
        worker=_worker_number(config),
    )
    state = GateSession(options, progress=_progress(config))
    config.stash[SESSION] = state
    config.pluginmanager.register(GateHooks(state), "quantguard-gates")
    config.pluginmanager.register(Termination(), "quantguard-termination")
    _narrow_arguments(config, state)


def _as_typed(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _worker_number(config: pytest.Config) -> int | None:
    worker = getattr(config, "workerinput", {}).get("workerid")
    return int(worker.removeprefix("gw")) if worker else None


def _progress(config: pytest.Config) -> Callable[[str], None]:
    """Lines between the test results, as many as `seconds_between` says; none with -q.

    Workers have no terminal. Capturing is lifted while a line is written, as for pytest's live logs.
    """
    verbosity = config.getoption("verbose")

    def write(line: str) -> None:
        terminal = config.pluginmanager.getplugin("terminalreporter")
        capture = config.pluginmanager.getplugin("capturemanager")
        if terminal is None or verbosity < 0:
            return
        with capture.global_and_fixture_disabled() if capture is not None else nullcontext():
            terminal.ensure_newline()
            terminal.write_line(_line(line))

    return ThrottledLines(write, seconds_between(verbosity, watched=sys.stdout.isatty()))


def _narrow_arguments(config: pytest.Config, state: GateSession) -> None:
    """Without paths on the command line only the gates are collected; ids of our tests are not paths."""
    if config.args_source != pytest.Config.ArgsSource.ARGS:
        if not any(word.startswith("--benchmark") for word in config.invocation_params.args):
            config.option.benchmark_quiet = True  # Its tables repeat our times and are too wide.
        config.args = []
        config.args_source = pytest.Config.ArgsSource.ARGS
        return
    ours = tuple(arg for arg in config.args if _is_own_id(arg, config, state))
    state.selection = ours
    config.args = [arg for arg in config.args if arg not in ours]


def _is_own_id(argument: str, config: pytest.Config, state: GateSession) -> bool:
    name = argument.split("::", 1)[0]
    if (config.invocation_params.dir / name).exists():
        return False
    try:
        return any(trial.config.name == name for trial in state.trials())
    except ConfigError:
        return False


class GateHooks:
    """Hooks of controller, worker and undistributed session."""

    def __init__(self, state: GateSession) -> None:
        self.state = state
        self.results: list[RunResult] = []
        self.remarks: list[str] = []

    def pytest_report_header(self) -> list[str]:
        """What each config puts on trial."""
        try:
            lines = [line for trial in self.state.trials() for line in header_lines(trial)]
            return fitted("\n".join(lines), text_width()).split("\n")
        except ConfigError:
            return [f"quantguard: {', '.join(map(str, self.state.options.config_paths))}"]

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Add the gates to what the session collects."""
        report = yield
        if isinstance(collector, pytest.Session) and report.result is not None:
            report.result = [*report.result, *self._gates(collector)]
        return report

    def _gates(self, session: pytest.Session) -> list[pytest.Collector]:
        try:
            return [Gate.of(session, self.state, trial) for trial in self.state.trials()]
        except ConfigError as error:
            return [BrokenGate.of(session, error)]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """A user's test that takes our fixtures runs once for each config."""
        if "quantguard" not in metafunc.fixturenames:
            return
        try:
            names = [trial.config.name for trial in self.state.trials()]
        except ConfigError:
            return  # The collection error says it.
        if len(names) > 1:
            metafunc.parametrize("quantguard", names, indirect=True, scope="session")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Of our tests keep those that were named on the command line, if any were."""
        if self.state.options.worker is not None:
            self._name_sharers(items)
        if not self.state.selection:
            return
        dropped = [
            item
            for item in items
            if isinstance(item, GateItem)
            and not any(item.nodeid == chosen or item.gate.name == chosen for chosen in self.state.selection)
        ]
        if dropped:
            config.hook.pytest_deselected(items=dropped)
            items[:] = [item for item in items if item not in dropped]

    def _name_sharers(self, items: list[pytest.Item]) -> None:
        """Under xdist, mark users' tests that need a gate's server, as xdist marks its own groups."""
        for item in items:
            if not isinstance(item, GateItem) and "quantguard" in getattr(item, "fixturenames", ()):
                callspec = getattr(item, "callspec", None)
                name = callspec.params["quantguard"] if callspec is not None else self._only_name()
                _rename(item, f"{item.nodeid}@{name}")

    def _only_name(self) -> str:
        return self.state.trials()[0].config.name

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Remember what was selected, to know at the end what is missing."""
        for item in session.items:
            if isinstance(item, CheckItem):
                self.state.planned.setdefault(item.gate.name, []).append(item.check.name)
        if not session.config.getoption("collectonly"):
            for name in self.state.planned:
                self.state.note(name)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Send what a check found along with pytest's report."""
        with _fitted_message(item, call):
            report = yield
        crash = getattr(report.longrepr, "reprcrash", None)
        if isinstance(item, GateItem) and crash is not None:
            crash.message = _in_short(item) or str(call.excinfo and call.excinfo.value).split("\n", 1)[0]
        if isinstance(item, Errand) and call.when == "call" and item.said:
            report.quantguard_said = item.said  # type: ignore[attr-defined]
        if isinstance(item, CheckItem) and (call.when == "call" or not report.passed):
            found = _found(item, call, report)
            sent = {"config": item.gate.name, "check": found.model_dump(mode="json")}
            report.quantguard = sent  # type: ignore[attr-defined]
            if call.when == "call":
                item.user_properties += _properties(found)
        return report

    def pytest_report_teststatus(
        self, report: pytest.TestReport
    ) -> tuple[str, str, tuple[str, Mapping[str, bool]]] | None:
        """Checks that only refer to the error of another one are counted, but not told one by one."""
        found = getattr(report, "quantguard", None)
        if found is None or not report.failed or not found["check"]["message"].startswith(NOT_RUN):
            return None
        return "not run", "-", ("NOT RUN", {"yellow": True})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep it; runs in the controller under xdist."""
        self.remarks += filter(None, [getattr(report, "quantguard_said", None)])
        found = getattr(report, "quantguard", None)
        if found is not None:
            self.state.record(found["config"], CheckResult.model_validate(found["check"]))
        elif report.when not in ("setup", "call", "teardown"):  # xdist's own, of a worker that died
            self._note_crash(report)

    def _note_crash(self, report: pytest.TestReport) -> None:
        name, _, check_id = report.nodeid.partition("::")
        for trial in self.state.trials():
            check = next((one for one in plan_checks(trial.config) if one.name == check_id), None)
            if trial.config.name == name and check is not None:
                self.state.record(name, _unjudged(check, "error", str(report.longrepr)), final=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Publish or write the results, and stop the servers whatever happens."""
        try:
            if self.state.options.worker is not None:
                session.config.workeroutput[PUBLISHED] = self.state.publish()  # type: ignore[attr-defined]
            else:
                self._finish(session)
        finally:
            self.state.close()

    def _finish(self, session: pytest.Session) -> None:
        if not session.config.getoption("collectonly"):
            self.results = self.state.finish()

    def pytest_unconfigure(self) -> None:
        """The last chance to stop the servers."""
        self.state.close()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The table."""
        for result in self.results:
            terminalreporter.section(f"quantguard: {result.name}", sep="=")
            report = self.state.reports.get(result.name)
            for line in render(
                result,
                width=terminalreporter._tw.fullwidth,
                verbosity=terminalreporter.verbosity,
                report=shown_path(report) if report is not None else None,
            ):
                terminalreporter.line(line.text, **line.markup)
            for command in workflow_commands(result):
                terminalreporter.write_line(command)
        for remark in self.remarks:
            terminalreporter.line(_line(remark), green=True)
        for problem in dict.fromkeys(self.state.problems):
            terminalreporter.line(_line(problem), red=True)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Keep all tests of one gate on one worker: they share a server."""
        distribution = config.getvalue("dist")
        if distribution == "each":
            raise pytest.UsageError(
                "--dist=each would start every gate's server once per worker; use --dist=load."
            )
        if distribution not in DISTRIBUTIONS:
            return None
        from pytest_quantguard.gate.distribution import GateScheduling

        return GateScheduling(config, log, [trial.config.name for trial in self.state.trials()])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Know what is to be checked, also where no worker lives to tell it at its end."""
        self.state.expect(ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take in what a worker published; a crashed worker has published nothing."""
        published = getattr(node, "workeroutput", {}).get(PUBLISHED)
        if published is not None:
            self.state.merge(published)


def _line(text: str) -> str:
    """What we say between or after the tests, as wide as the terminal."""
    return fitted(f"quantguard: {visible(with_short_paths(text))}", text_width())


@contextmanager
def _fitted_message(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Our messages are as wide as the terminal where pytest shows them, and unbroken everywhere else."""
    error = call.excinfo.value if call.excinfo is not None else None
    if not isinstance(item, GateItem) or not isinstance(error, pytest.fail.Exception) or error.pytrace:
        yield
        return
    whole = error.msg
    error.msg = fitted(whole or "", text_width())
    try:
        yield
    finally:
        error.msg = whole


def _in_short(item: pytest.Item) -> str:
    """What failed by how much, for a line that begins with the check's id; empty where that is no figure."""
    found = item.result if isinstance(item, CheckItem) else None
    if found is None or found.outcome != "failed" or found.value is None or found.bound is None:
        return ""
    allowed = "at most" if found.bound_side == "max" else "at least"
    return f"{figure(found.value, found.unit)}, {allowed} {bound_text(found)[2:]}"


def _properties(found: CheckResult) -> list[tuple[str, object]]:
    """What JUnit XML keeps of a check beside its outcome."""
    low, high = found.interval or (None, None)
    figures = {name: getattr(found, name) for name in ("metric", "value", "unit", "bound", "noise_floor")}
    figures |= {"interval_low": low, "interval_high": high}
    return [pair for pair in figures.items() if pair[1] is not None]


def _found(item: CheckItem, call: pytest.CallInfo[None], report: pytest.TestReport) -> CheckResult:
    """What the item found, or why it found nothing."""
    if item.result is not None and call.when == "call":
        return item.result
    message = "" if call.excinfo is None else str(call.excinfo.value)
    return _unjudged(item.check, "skipped" if report.skipped else "error", message)


def _unjudged(check: Check, outcome: Outcome, message: str) -> CheckResult:
    return without_figures(
        check, outcome, message, {"comparison": check.comparison} if check.comparison else {}
    )


def _rename(item: pytest.Item, nodeid: str) -> None:
    """Give an item another id, as xdist's groups do; pytest 9.2 keeps ids as objects, older ones as text."""
    held: Any = item
    if hasattr(held, "_nodeid"):
        held._nodeid = nodeid
    else:
        held._id = type(held._id).parse(nodeid)
