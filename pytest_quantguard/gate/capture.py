"""Records the baseline of a config: starts the reference, captures, writes."""

from __future__ import annotations

from pytest_quantguard.baseline.store import write_recording
from pytest_quantguard.errors import ConfigError
from pytest_quantguard.gate.portable import portable
from pytest_quantguard.gate.trial import Trial
from pytest_quantguard.measure.capture import capture
from pytest_quantguard.serving.launch import start


def record_baseline(trial: Trial) -> str:
    """Capture and store; returns a sentence for the user. Raises `QuantguardError` with the cause."""
    config = trial.config
    if config.reference is None:
        raise ConfigError(
            f"{trial.config_path}: there is no `reference`, so no baseline can be captured. Add the server "
            "of the "
            "unquantized model: reference: {backend: sglang, model_path: ..., dtype: bfloat16}."
        )
    suite = trial.suite()
    trial.progress(f"starting the reference ({config.reference.backend})")
    with start(
        config.reference,
        log_path=trial.options.output / "reference.log",
        worker=trial.options.worker,
        progress=trial.progress,
    ) as server:
        recording = capture(
            server, suite, portable(config, trial.config_path.parent), progress=trial.progress
        )
    write_recording(config.baseline, recording)
    cells = len(recording.cells)
    return (
        f"baseline written to {config.baseline}: {len(recording.prompts)} prompts, "
        f"{config.suite.score_tokens} scored tokens each, {cells} cells. Run the gate without the update "
        "flag to use it."
    )
