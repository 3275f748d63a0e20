from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_quantguard.config import SuiteConfig
from pytest_quantguard.errors import ConfigError
from pytest_quantguard.prompts.builtin import apportion, builtin_prompts
from pytest_quantguard.prompts.freeform import FREEFORM
from pytest_quantguard.prompts.lengths import cut_text, estimate_tokens
from pytest_quantguard.prompts.prompt import Prompt
from pytest_quantguard.prompts.scoring import check_gold
from pytest_quantguard.prompts.suite import digest_suite, load_suite, read_prompts
from pytest_quantguard.prompts.tasks import TASKS

# --- the built-in suite ---


def load(**settings: object) -> tuple[Prompt, ...]:
    return load_suite(SuiteConfig.model_validate(settings), base_folder=Path()).prompts


def test_the_small_suite_is_short_and_mixed() -> None:
    prompts = load(max_prompt_tokens=160)
    lengths = [estimate_tokens(prompt.text or "") for prompt in prompts]
    assert len(prompts) == 32
    assert 60 <= sum(lengths) / 32 <= 80
    assert min(lengths) >= 28
    assert max(lengths) <= 160
    assert len({prompt.task for prompt in prompts}) == 10
    assert {prompt.language for prompt in prompts} == {"en", "zh"}
    assert len({prompt.id for prompt in prompts}) == len({prompt.text for prompt in prompts}) == 32
    for prompt in prompts:
        assert (prompt.task in TASKS) == bool(prompt.gold)
        if prompt.gold:
            check_gold(prompt.task, prompt.gold)


def test_the_same_settings_give_the_same_suite_and_others_another() -> None:
    def digest(**settings: object) -> str:
        return load_suite(SuiteConfig.model_validate(settings), base_folder=Path("elsewhere")).digest

    assert digest() == digest()
    others = [digest(seed=1), digest(size=31), digest(max_prompt_tokens=300), digest(mix={"qa": 1})]
    assert len({digest(), *others}) == 5


@pytest.mark.parametrize(
    ("limit", "digest"),
    [
        (96, "ca1b5b23a61694da2bbb5b55509cced486f4f3d352f2ab1c6f6d19ef7d5ad795"),
        (160, "423cb033fe3bf02a1f4d365a52fe44749ba8733e7b3f1450f5aca5a944c9dcbf"),
    ],
)
def test_the_suite_of_this_version(limit: int, digest: str) -> None:
    """Stored baselines hold this digest: a change of the built-in texts makes every one of them stale."""
    suite = load_suite(SuiteConfig(max_prompt_tokens=limit), base_folder=Path())
    assert suite.digest == digest
    assert suite.name == "builtin"


@pytest.mark.parametrize("limit", [8, 16, 40, 100, 700, 5000])
def test_no_prompt_exceeds_the_limit(limit: int) -> None:
    prompts = load(max_prompt_tokens=limit, size=60)
    lengths = [estimate_tokens(prompt.text or "") for prompt in prompts]
    assert len(prompts) == 60
    assert max(lengths) <= limit
    assert max(lengths) >= limit * 0.6
    # Most are short.
    assert sorted(lengths)[30] <= max(limit * 0.5, 100)


def test_mixes() -> None:
    prompts = load(size=40, mix={"code": 3, "niah": 1, "prose": 0})
    assert [sum(prompt.task == task for prompt in prompts) for task in ("code", "niah", "prose")] == [
        30,
        10,
        0,
    ]
    tasks = [prompt.task for prompt in prompts]
    assert tasks != sorted(tasks), "batches of consecutive prompts must be mixed"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mix": {"niha": 1}}, "suite.mix: there is no task 'niha'. Did you mean 'niah'? Known: mcq, qa"),
        ({"mix": {"qa": -1}}, "suite.mix.qa: -1.0 is no weight"),
        ({"mix": {"qa": float("inf")}}, "suite.mix.qa: inf is no weight"),
        ({"mix": {"qa": 0}}, "at least one task needs a weight above 0"),
        ({"mix": {"cwe": 1}, "max_prompt_tokens": 50}, "suite.mix.cwe: this task needs at least"),
    ],
)
def test_impossible_mixes(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**settings)
    assert message in str(caught.value)


@given(
    st.dictionaries(st.text(max_size=3), st.floats(0.01, 100), min_size=1, max_size=8), st.integers(0, 300)
)
def test_apportioned_shares(weights: dict[str, float], size: int) -> None:
    shares = apportion(weights, size)
    assert sum(shares.values()) == size
    total = sum(weights.values())
    for kind, weight in weights.items():
        assert abs(shares[kind] - size * weight / total) < 1 + 1e-6


@pytest.mark.parametrize("kind", FREEFORM)
@pytest.mark.parametrize("tokens", [8, 50, 3000])
def test_free_forms_have_their_length(kind: str, tokens: int) -> None:
    (prompt,) = builtin_prompts(size=1, max_prompt_tokens=tokens, mix={kind: 1}, seed=tokens)
    assert prompt.text == prompt.text.strip()
    assert 0 < estimate_tokens(prompt.text) <= tokens


@given(st.text(alphabet="ab ,.1夜晚\n", min_size=1).filter(str.strip), st.integers(1, 20))
def test_cut_texts_are_beginnings(text: str, tokens: int) -> None:
    cut = cut_text(text, tokens, estimate_tokens)
    assert text.startswith(cut)
    assert estimate_tokens(cut) <= tokens or len(cut.split()) == 1 or len(cut.strip()) == 1


# --- prompts of one's own ---


def write(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_file_of_prompts(tmp_path: Path) -> None:
    write(
        tmp_path,
        '\ufeff{"id": "a", "task": "qa", "text": "Who?", "gold": ["Orlin", 1462]}\r\n'
        '{"prompt": "Once upon a time"}\n'
        '{"task": "mcq", "question": "Which?", "gold": "B", "source": "elsewhere"}\n'
        '{"token_ids": [1, 2, 3]}',
    )
    suite = load_suite(SuiteConfig(prompts="prompts.jsonl"), base_folder=tmp_path)
    assert suite.prompts == (
        Prompt("a", "qa", "Who?", gold=("Orlin", "1462")),
        Prompt("line-2", "unnamed", "Once upon a time"),
        Prompt("line-3", "mcq", "Which?", gold=("B",)),
        Prompt("line-4", "unnamed", token_ids=(1, 2, 3)),
    )
    assert suite.tasks == {"qa": 1, "unnamed": 2, "mcq": 1}
    assert len(suite) == len(list(suite)) == 4
    assert suite.digest == digest_suite(read_prompts(tmp_path / "prompts.jsonl"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "line 2: empty"),
        ("   ", "line 2: empty"),
        ("{", "line 2: no JSON"),
        (b'{"text": "\xff"}', "line 2: no JSON"),
        ("[1]", "line 2: not an object"),
        ("{}", "line 2: needs either a text"),
        ('{"text": "a", "token_ids": [1]}', "line 2: needs either a text"),
        ('{"text": "a", "prompt": "b"}', "line 2: has `text` and `prompt`: one text is enough"),
        ('{"text": " "}', "line 2: `text` must be a text that is not blank"),
        ('{"text": 5}', "line 2: `text` must be a text that is not blank"),
        ('{"token_ids": []}', "line 2: `token_ids` must be a list of token numbers"),
        ('{"token_ids": [1, -1]}', "line 2: `token_ids` must be a list of token numbers"),
        ('{"token_ids": [1.5]}', "line 2: `token_ids` must be a list of token numbers"),
        ('{"token_ids": [true]}', "line 2: `token_ids` must be a list of token numbers"),
        ('{"text": "b", "id": "first"}', "line 2: the id 'first' is that of line 1"),
        ('{"text": "b", "gold": []}', "line 2: `gold` must be an answer or a list of answers"),
        ('{"text": "b", "gold": [""]}', "line 2: `gold` must be an answer or a list of answers"),
        ('{"text": "b", "gold": {"a": 1}}', "line 2: `gold` must be an answer or a list of answers"),
        (
            '{"text": "b", "task": "mcq", "gold": "541"}',
            "line 2: the gold answer of an mcq must be one letter",
        ),
        ('{"text": "b", "task": "qa", "gold": "?"}', "line 2: the gold answer '?' holds nothing"),
    ],
)
def test_bad_lines_are_numbered(tmp_path: Path, line: str | bytes, message: str) -> None:
    content = b'{"text": "a", "id": "first"}\n' + (line.encode() if isinstance(line, str) else line) + b"\n"
    with pytest.raises(ConfigError) as caught:
        read_prompts(write(tmp_path, content))
    assert message in str(caught.value)
    assert str(tmp_path / "prompts.jsonl") in str(caught.value)
    assert '{"id": "a1", "task": "qa", "text": "..."}' in str(caught.value)


def test_many_bad_lines_are_counted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 10: no JSON[^\n]*\n  and 15 more"):
        read_prompts(write(tmp_path, "x\n" * 25))


def test_missing_gold_is_an_error_where_answers_are_scored(tmp_path: Path) -> None:
    path = write(tmp_path, '{"text": "a", "task": "qa"}\n{"text": "b", "task": "qa", "gold": "x"}\n')
    assert len(read_prompts(path)) == 2
    with pytest.raises(ConfigError, match="line 1: there is no gold answer"):
        read_prompts(path, need_gold=True)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.jsonl cannot be read: No such file.*suite.prompts"):
        load_suite(SuiteConfig(prompts="none.jsonl"), base_folder=tmp_path)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_suite(SuiteConfig(prompts="."), base_folder=tmp_path)
    with pytest.raises(ConfigError, match="holds no prompts"):
        read_prompts(write(tmp_path, ""))


def test_a_prompt_is_text_or_tokens() -> None:
    with pytest.raises(ValueError, match="either text or token_ids"):
        Prompt("a", "qa")


@pytest.mark.parametrize(
    ("remedy", "said"), [({}, "Give a JSONL file of prompts."), ({"remedy": "Set it."}, "Set it.")]
)
def test_a_file_that_cannot_be_read_comes_with_its_remedy(
    tmp_path: Path, remedy: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=f"cannot be read: No such file or directory. {said}"):
        read_prompts(tmp_path / "builtin", **remedy)
