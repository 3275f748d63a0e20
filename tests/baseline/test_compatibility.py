from __future__ import annotations

from pathlib import Path

import pytest

from pytest_quantguard.baseline.compatibility import (
    Expectation,
    check_compatible,
    differences,
    environment_differences,
)
from pytest_quantguard.errors import BaselineError

from .samples import make_recording

RECORDING = make_recording()
FITTING = Expectation(
    model_path="org/model",
    dtype="bfloat16",
    prompts="builtin",
    suite_digest="a" * 64,
    score_tokens=6,
    top_logprobs=32,
    batch_sizes=[8],
    phases=["decode"],
)


def check(expected: Expectation) -> None:
    check_compatible(RECORDING, expected, path=Path("baselines/x"), command="quantguard capture x.yaml")


def test_what_fits_passes_also_where_less_is_asked() -> None:
    check(FITTING)
    check(Expectation())


def test_the_difference_is_a_table_with_the_command_that_mends_it() -> None:
    with pytest.raises(BaselineError) as caught:
        check(
            Expectation(model_path="org/other", suite_digest="b" * 64, top_logprobs=256, batch_sizes=[1, 32])
        )
    assert str(caught.value) == (
        "The baseline at baselines/x belongs to another config:\n"
        "                stored               expected\n"
        "  model_path    org/model            org/other\n"
        "  suite_digest  aaaaaaaaaaaaaaaa...  bbbbbbbbbbbbbbbb...\n"
        "  top_logprobs  32                   256\n"
        "  batch_sizes   1, 8                 1, 32\n"
        "Record it anew with: quantguard capture x.yaml\n"
        "or point the config to the recording that belongs to it."
    )


@pytest.mark.parametrize(
    ("expected", "row"),
    [
        (Expectation(model_path="m"), ("model_path", "org/model", "m")),
        (Expectation(revision="abc"), ("revision", "not stated", "abc")),
        (Expectation(dtype="float16"), ("dtype", "bfloat16", "float16")),
        (Expectation(vocab_size=5), ("vocab_size", "4000", "5")),
        (Expectation(prompts="mine.jsonl"), ("prompts", "builtin", "mine.jsonl")),
        (Expectation(score_tokens=7), ("score_tokens", "6", "7")),
        (Expectation(top_logprobs=64), ("top_logprobs", "32", "64")),
        (Expectation(tokenizer_digest="c" * 64), ("tokenizer_digest", "not stated", "c" * 16 + "...")),
    ],
)
def test_each_difference(expected: Expectation, row: tuple[str, str, str]) -> None:
    assert differences(RECORDING, expected) == [row]


def test_environments() -> None:
    now = RECORDING.manifest.model_copy(
        update={
            "server": RECORDING.manifest.server.model_copy(
                update={"version": "0.6.0", "arguments": {"tp_size": 2}}
            ),
            "environment": {"python": "3.12"},
        }
    )
    assert environment_differences(RECORDING.manifest, RECORDING.manifest) == []
    assert environment_differences(RECORDING.manifest, now) == [
        ("environment.python", "3.11", "3.12"),
        ("server.arguments.tp_size", "not stated", "2"),
        ("server.version", "0.5.23", "0.6.0"),
    ]
