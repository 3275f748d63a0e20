"""`result.json`: written whole, read with a message for everything that can be wrong with it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from pytest_quantguard.errors import QuantguardError
from pytest_quantguard.results import read_result, write_result
from tests.report.test_terminal import TABLE, check, result


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written = result(TABLE, notes=["a note"])
    path = write_result(tmp_path / "new" / "folder", written)
    assert read_result(path) == written
    assert read_result(path.parent) == written
    assert [file.name for file in path.parent.iterdir()] == ["result.json"]


def test_not_a_number_becomes_null(tmp_path: Path) -> None:
    path = write_result(tmp_path, result([check("accuracy", "prefill", 1, "kl_mean", math.nan)]))
    assert json.loads(path.read_text(encoding="utf-8"))["checks"][0]["value"] is None
    assert read_result(path).checks[0].value is None


def test_failures_are_failed_and_impossible_checks() -> None:
    checks = [
        check("accuracy", "prefill", size, "kl_mean", 1.0, outcome=outcome)
        for size, outcome in enumerate(("passed", "failed", "warned", "error", "skipped"), start=1)
    ]
    assert [one.batch_size for one in result(checks).failures] == [2, 4]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "There is no result at .*quantguard run CONFIG"),
        ("{", "is not JSON"),
        ("[]", "is not a result of pytest-quantguard"),
        ('{"schema_version": 1}', "is not a result of pytest-quantguard: name"),
        ('{"schema_version": 99}', "has schema version 99; this pytest-quantguard reads up to 1. Upgrade"),
    ],
)
def test_what_cannot_be_read_is_explained(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "result.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(QuantguardError, match=message):
        read_result(path)


def test_a_failed_write_is_explained_and_leaves_no_scraps(tmp_path: Path) -> None:
    (tmp_path / "result.json").mkdir()
    with pytest.raises(QuantguardError, match=r"could not be written .*--quantguard-output"):
        write_result(tmp_path, result(TABLE))
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]
