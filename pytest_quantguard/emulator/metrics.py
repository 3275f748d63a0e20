"""The counters and gauges of SGLang's `/metrics` that mean something here, in Prometheus' text format."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from pytest_quantguard.emulator.sequences import SequenceResult


class Metrics:
    """Counts of one server; safe to use from any thread."""

    def __init__(self, model_name: str) -> None:
        self._labels = f'{{model_name="{escape(model_name)}"}}'
        self._lock = threading.Lock()
        self._counters = dict.fromkeys(
            ("prompt_tokens_total", "generation_tokens_total", "cached_tokens_total", "num_requests_total",
             "num_aborted_requests_total"),
            0,
        )  # fmt: skip

    def finished(self, result: SequenceResult) -> None:
        """Count a sequence that has ended."""
        aborted = (result.finish_reason or {}).get("type") == "abort"
        with self._lock:
            self._counters["prompt_tokens_total"] += result.prompt_tokens
            self._counters["generation_tokens_total"] += len(result.output_ids)
            self._counters["cached_tokens_total"] += result.cached_tokens
            self._counters["num_requests_total"] += 1
            self._counters["num_aborted_requests_total"] += aborted

    def abandoned(self, count: int) -> None:
        """Count sequences whose client went away before their end."""
        with self._lock:
            self._counters["num_requests_total"] += count
            self._counters["num_aborted_requests_total"] += count

    def render(self, gauges: Mapping[str, float]) -> str:
        """The text of `/metrics`; `gauges` are the values that the engine knows now."""
        with self._lock:
            counters = dict(self._counters)
        lines: list[str] = []
        for kind, values in (("gauge", gauges), ("counter", counters)):
            for name, value in values.items():
                lines.append(f"# HELP sglang:{name} {DESCRIPTIONS[name]}")
                lines.append(f"# TYPE sglang:{name} {kind}")
                lines.append(f"sglang:{name}{self._labels} {float(value)}")
        return "\n".join(lines) + "\n"


DESCRIPTIONS = {
    "num_running_reqs": "The number of running requests.",
    "num_queue_reqs": "The number of requests in the waiting queue.",
    "context_len": "Maximum context length.",
    "prompt_tokens_total": "Number of prefill tokens processed.",
    "generation_tokens_total": "Number of generation tokens processed.",
    "cached_tokens_total": "Number of cached prompt tokens.",
    "num_requests_total": "Number of requests processed.",
    "num_aborted_requests_total": "Number of requests aborted.",
}


def escape(text: str) -> str:
    """A label's value as Prometheus quotes it."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
