"""The documentation is current, its links lead somewhere, its configs are right, its commands exist."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from pytest_quantguard.cli import COMMANDS, build_parser
from pytest_quantguard.config_file import load_config
from pytest_quantguard.config_reference import render_reference
from pytest_quantguard.config_schema import json_schema

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
NAMES = {module.NAME for module in COMMANDS}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)|!\[[^\]\n]*\]\(([^)\s]+)\)")
BASE = """
version: 1
name: base
reference: {backend: sglang, model_path: org/model}
candidate: {backend: sglang, model_path: org/model, quantization: fp8}
baseline: baseline
accuracy: {kl_mean: {max: 0.1}}
"""


def fences(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in one of the languages."""
    return [
        body for language, body in FENCE.findall(page.read_text(encoding="utf-8")) if language in languages
    ]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub and mkdocs give to headings."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    found = set()
    for heading in re.findall(r"^#+ +(.+)$", text, re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower())
        found.add(words.strip().replace(" ", "-"))
    return found


def test_schema_is_current() -> None:
    committed = json.loads((DOCS / "config.schema.json").read_text(encoding="utf-8"))
    assert committed == json_schema(), "quantguard schema > docs/config.schema.json"


def test_config_reference_is_current() -> None:
    committed = (DOCS / "configuration.md").read_text(encoding="utf-8")
    assert committed == render_reference(json_schema()), (
        "quantguard schema --markdown > docs/configuration.md"
    )


def test_reference_explains_every_key() -> None:
    rows = [line for line in render_reference(json_schema()).splitlines() if line.startswith("| `")]
    assert len(rows) > 150
    assert [row for row in rows if row.endswith("|  |")] == [], "a key without a description"
    assert "| `kl_mean` | lower | nats |" in "\n".join(rows)
    for section in ("reference", "candidate", "suite", "accuracy", "selftest"):
        assert any(f"`{section}`" in row for row in rows)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_name_their_schema(path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    named = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", first)
    assert named is not None, f"{path.name} should begin with the hint for editors"
    assert (path.parent / named[1]).resolve() == DOCS / "config.schema.json"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_editors_find_nothing_wrong_with_examples(path: Path) -> None:
    jsonschema.Draft202012Validator(json_schema()).validate(yaml.safe_load(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speeed: null", "'speeed' was unexpected"),
        ("name: 5", "5 is not of type 'string'"),
        ("accuracy: {kl_maen: {max: 1}}", "'kl_maen' was unexpected"),
        ("accuracy: {kl_mean: {max: x}}", "is not valid under any of the given schemas"),
        ("candidate: {model_path: x}", "'backend' is a required property"),
        ("accuracy: null", "None is not of type 'object'"),
    ],
)
def test_editors_mark_mistakes(text: str, message: str) -> None:
    document = {**yaml.safe_load(BASE), **yaml.safe_load(text)}
    errors = jsonschema.Draft202012Validator(json_schema()).iter_errors(document)
    assert any(message in error.message for error in errors)


def test_editors_ask_for_the_whole_only_where_nothing_is_extended() -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    part = {"name": "x", "candidate": {"faults": ["lm_head_zero"]}, "speed": {"max_slowdown": "5%"}}
    assert [error.message for error in validator.iter_errors({"extends": "base.yaml", **part})] == []
    missing = {error.message for error in validator.iter_errors(part)}
    assert "'accuracy' is a required property" in missing
    assert "'backend' is a required property" in missing


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for match in LINK.finditer(FENCE.sub("", page.read_text(encoding="utf-8"))):
        target = match[1] or match[2]
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        outside = page.parent == DOCS and not path.is_relative_to(DOCS)  # the site holds docs/ only
        if outside or not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_documented_commands_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    code = "\n".join([*re.findall(r"`([^`\n]+)`", text), *(body for _, body in FENCE.findall(text))])
    used = set(re.findall(r"(?:^|[\s`$])quantguard ([a-z][a-z-]+)\b(?![:.])", code, re.MULTILINE))
    assert used <= NAMES, f"{page.name} names commands that do not exist: {sorted(used - NAMES)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_documented_flags_exist(page: Path) -> None:
    """Every `quantguard COMMAND ... --flag` in a block for the terminal is understood by the parser."""
    known = {
        module.NAME: set(re.findall(r"--[a-z][a-z-]+", _help_of(module.NAME))) | {"--help"}
        for module in COMMANDS
    }
    for block in fences(page, "", "console", "bash", "sh"):
        for command, rest in re.findall(r"quantguard ([a-z-]+)((?: [^\n#]*)?)", block.replace("\\\n", " ")):
            if command in NAMES:
                ours = rest.split(" -- ")[0]
                unknown = set(re.findall(r"(?<=\s)--[a-z][a-z-]+", ours)) - known[command]
                assert not unknown, f"{page.name}: quantguard {command} has no {unknown}"


def _help_of(command: str) -> str:
    actions: Any = next(action for action in build_parser()._actions if action.dest == "command")
    return str(actions.choices[command].format_help())


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_documented_configs_are_right(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole configs load as they are; parts of one load on top of a plain config."""
    monkeypatch.setenv("INFERENCE_KEY", "x")
    (tmp_path / "base.yaml").write_text(BASE, encoding="utf-8")
    (tmp_path / "qwen3-8b-nvfp4.yaml").write_text(BASE, encoding="utf-8")
    for name in ("smollm2-nvfp4.yaml", "smollm2-135m-nvfp4.yaml"):
        (tmp_path / name).write_text(BASE.replace("sglang", "emulator"), encoding="utf-8")
    for number, block in enumerate(fences(page, "yaml")):
        if re.search(r"^(-|quantization:|command:|name: quantguard|baseline:.*\nbaseline:|# yaml-)", block):
            continue
        loaded = yaml.safe_load(block)
        head = "" if "version" in loaded or "extends" in loaded else "extends: base.yaml\n"
        path = tmp_path / f"{number}.yaml"
        path.write_text(head + block, encoding="utf-8")
        load_config(path)


def test_the_page_of_commands_has_them_all() -> None:
    page = (DOCS / "commands.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `quantguard ([a-z-]+)", page, re.MULTILINE) == [
        module.NAME for module in COMMANDS
    ]
    options = subprocess.run(
        [sys.executable, "-m", "pytest", "--help"], capture_output=True, encoding="utf-8", check=True
    )
    assert set(re.findall(r"--quantguard-[a-z-]+", options.stdout)) == set(
        re.findall(r"--quantguard-[a-z-]+", page)
    )


def test_every_page_is_in_the_navigation() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = re.findall(r"[\w-]+\.md", json.dumps(site["nav"]))
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md"))
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    assert [name for name in listed if name != "index.md" and f"({name})" not in index] == []


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None,
    reason="mkdocs comes with the `docs` extra, which is not installed",
)
def test_site_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_the_first_command_of_the_readme_needs_no_package_of_the_tests(tmp_path: Path) -> None:
    """In a checkout pytest reads tests/conftest.py even if a gate alone is run."""
    for name in ("hypothesis", "datasketch"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not installed here')\n", encoding="utf-8")
    words = ["-p", "no:hypothesispytest", "-p", "no:xdist", "--collect-only", "-q"]
    gate = "--quantguard-config=examples/smollm2-nvfp4.yaml"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, gate],
        cwd=DOCS.parent,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "smollm2-nvfp4::accuracy[prefill-bs1-kl_mean]" in done.stdout
