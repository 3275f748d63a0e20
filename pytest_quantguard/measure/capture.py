"""Records a server: its greedy continuations and its cells, repeated so that its own noise is known.

`capture` makes a baseline out of the reference; `accept` makes an accepted run out of a candidate's cells.
What a recording looks like on disk is the business of `baseline`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Literal, Protocol

import pytest_quantguard
from pytest_quantguard.baseline.manifest import (
    Manifest,
    SuiteRecord,
    digest_prompts,
)
from pytest_quantguard.baseline.recording import Cell, CellKey, PromptRecord, Recording
from pytest_quantguard.config import (
    GateConfig,
    ServerConfig,
    SuiteConfig,
)
from pytest_quantguard.errors import BaselineError, ConfigError
from pytest_quantguard.measure.cells import CellMeasurement, measure_cell
from pytest_quantguard.measure.comparison import noise_floor
from pytest_quantguard.measure.continuation import CapturingClient, continue_prompts
from pytest_quantguard.measure.decode import choose_decode
from pytest_quantguard.measure.identity import describe_environment, describe_model, describe_server
from pytest_quantguard.measure.waiting import Progress
from pytest_quantguard.prompts.suite import PromptSuite
from pytest_quantguard.serving.answers import Capabilities


class Server(Protocol):
    """What measuring needs of a running server."""

    @property
    def client(self) -> CapturingClient: ...

    @property
    def capabilities(self) -> Capabilities: ...


def capture(
    server: Server,
    suite: PromptSuite,
    config: GateConfig,
    *,
    device: str | None = None,
    progress: Progress | None = None,
) -> Recording:
    """Record the reference: continuations, then every cell of the suite `suite.repeats` times.

    device: what it runs on, see `serving.fingerprint.device_of`; None where that is not known.
    The first repeat is stored; the noise floor is the worst difference from it to the other repeats and to
    the other batch sizes. Raises `BaselineError` for prompts that cannot be scored, `InvalidAnswerError`
    for answers that cannot be used.
    """
    if config.reference is None:
        raise ConfigError(f"{config.name}: there is no `reference` to capture a baseline from.")
    asked = config.suite
    decode = choose_decode(asked.decode_mode, server.capabilities)
    prompts = continue_prompts(
        server.client,
        suite.prompts,
        score_tokens=asked.score_tokens,
        batch_size=max(asked.batch_sizes),
        context_length=server.capabilities.context_length,
        progress=progress,
    )
    recordings: dict[CellKey, list[Cell]] = {}
    for repeat in range(1, asked.repeats + 1):
        for key in cell_keys(asked):
            measurement = measure_cell(
                server.client,
                prompts,
                key,
                top_logprobs=asked.top_logprobs,
                decode=decode,
                progress=_prefixed(progress, f"capture, repeat {repeat} of {asked.repeats}: "),
            )
            recordings.setdefault(key, []).append(measurement.cell)
    return Recording(
        manifest=_manifest(
            "baseline",
            config,
            config.reference,
            server.capabilities,
            device,
            suite_digest=suite.digest,
            prompts=prompts,
            cells=[cells[0] for cells in recordings.values()],
            decode=decode.mode,
            repeats=asked.repeats,
        ),
        prompts=prompts,
        cells={key: cells[0] for key, cells in recordings.items()},
        noise_floor=noise_floor(recordings),
    )


def accept(
    measurements: Sequence[CellMeasurement],
    *,
    config: GateConfig,
    capabilities: Capabilities,
    baseline: Recording,
    device: str | None = None,
    repeats: Mapping[CellKey, Sequence[Cell]] | None = None,
) -> Recording:
    """The candidate's answers of this session as a recording that later runs are compared with.

    measurements: one for each cell of the suite. device: as for `capture`. repeats: further answers of the
        same cells, if the candidate's own jitter was measured. Its identity (model, quantization, KV cache,
        server version and arguments) is in the manifest. Raises `BaselineError` where a cell of the suite was
        not measured.
    """
    cells = {measurement.key: measurement.cell for measurement in measurements if not measurement.warm}
    missing = [str(key) for key in cell_keys(config.suite) if key not in cells]
    if missing:
        raise BaselineError(
            f"{config.name}: this run cannot be accepted, it did not measure {', '.join(missing)}. Run "
            "all accuracy tests of the config (no -k, no test ids) together with --quantguard-accept."
        )
    repeated = {key: [cells[key], *(repeats or {}).get(key, ())] for key in cell_keys(config.suite)}
    modes = {measurement.mode for measurement in measurements if measurement.key.phase == "decode"}
    return Recording(
        manifest=_manifest(
            "accepted",
            config,
            config.candidate,
            capabilities,
            device,
            suite_digest=baseline.manifest.suite.suite_digest,
            prompts=baseline.prompts,
            cells=[parts[0] for parts in repeated.values()],
            decode=", ".join(sorted(modes)) or None,
            repeats=max(len(parts) for parts in repeated.values()),
        ),
        prompts=baseline.prompts,
        cells={key: parts[0] for key, parts in repeated.items()},
        noise_floor=noise_floor(repeated),
    )


def cell_keys(suite: SuiteConfig) -> tuple[CellKey, ...]:
    """Every cell of a suite, in the order in which it is measured."""
    return tuple(CellKey(phase, size) for phase in suite.phases for size in suite.batch_sizes)


def _manifest(
    kind: Literal["baseline", "accepted"],
    config: GateConfig,
    asked_of: ServerConfig,
    capabilities: Capabilities,
    device: str | None,
    *,
    suite_digest: str,
    prompts: Sequence[PromptRecord],
    cells: Sequence[Cell],
    decode: str | None,
    repeats: int,
) -> Manifest:
    suite = config.suite
    prompts_digest = digest_prompts(
        [prompt.token_ids.tolist() for prompt in prompts], [prompt.prompt_tokens for prompt in prompts]
    )
    return Manifest(
        kind=kind,
        name=config.name,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        package_version=pytest_quantguard.__version__,
        model=describe_model(asked_of, capabilities, vocab_size=cells[0].rows[0].vocab_size),
        suite=SuiteRecord(
            prompts=suite.prompts,
            suite_digest=suite_digest,
            prompts_digest=prompts_digest,
            prompt_count=len(prompts),
            score_tokens=suite.score_tokens,
            top_logprobs=suite.top_logprobs,
            width=min(rows.width for cell in cells for rows in cell.rows),
            batch_sizes=list(suite.batch_sizes),
            phases=list(suite.phases),
            decode_mode=decode if "decode" in suite.phases else None,
        ),
        server=describe_server(asked_of, capabilities),
        repeats=repeats,
        environment=describe_environment(device),
    )


def _prefixed(progress: Progress | None, prefix: str) -> Progress | None:
    return None if progress is None else lambda line: progress(prefix + line)
