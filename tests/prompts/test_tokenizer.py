from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pytest_quantguard.errors import ConfigError
from pytest_quantguard.prompts.tokenizer import ChatTokenizer

tokenizers = pytest.importorskip("tokenizers")

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
HELLO = [{"role": "user", "content": "hello world"}]
LLAMA_LIKE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A word-level tokenizer that puts <s> before every text, as Llama's does."""
    words = [
        "<s>",
        "</s>",
        "<unk>",
        "hello",
        "world",
        "[user]",
        "[assistant]",
        "[system]",
        "be",
        "kind",
        "day",
        "2025",
    ]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    configure(tmp_path, bos_token="<s>", eos_token={"content": "</s>"}, chat_template=LLAMA_LIKE)
    return tmp_path


def configure(folder: Path, **settings: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def test_bos_is_never_doubled(folder: Path) -> None:
    tokenizer = ChatTokenizer(folder)
    assert tokenizer.encode("hello world") == (0, 3, 4)
    assert tokenizer.encode("<s> hello world") == (0, 3, 4)
    assert tokenizer.encode_chat(HELLO) == (0, 5, 3, 4, 6)
    assert tokenizer.encode(tokenizer.render_chat(HELLO)) == (0, 5, 3, 4, 6)


def test_a_template_without_bos_gets_none(folder: Path) -> None:
    configure(folder, bos_token="<s>", chat_template=LLAMA_LIKE.replace("{{ bos_token }}", ""))
    assert ChatTokenizer(folder).encode_chat(HELLO) == (5, 3, 4, 6)


def test_counting_and_decoding(folder: Path) -> None:
    tokenizer = ChatTokenizer(folder)
    assert tokenizer.count("hello world") == 2
    assert tokenizer.decode([0, 3, 4]) == "hello world"
    assert tokenizer.decode([0, 3], skip_special_tokens=False) == "<s> hello"


def test_where_the_template_is_found(folder: Path) -> None:
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "hello {{ eos_token }}"},
    ]
    configure(folder, chat_template=named, eos_token={"content": "</s>"})
    assert ChatTokenizer(folder).encode_chat(HELLO) == (3, 1)
    (folder / "chat_template.jinja").write_text("world", encoding="utf-8")
    assert ChatTokenizer(folder).encode_chat(HELLO) == (4,)


def test_variables_and_helpers_of_templates(folder: Path) -> None:
    configure(
        folder,
        chat_template="{% if kind %}kind{% endif %} {{ messages|tojson }} {{ strftime_now('%Y') }}"
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{% endfor %}",
    )
    assert ChatTokenizer(folder).render_chat(HELLO, kind=True).startswith('kind [{"role": "user"')
    assert ChatTokenizer(folder).render_chat(HELLO).endswith("2025")


def test_the_digest_covers_tokenizer_and_template(folder: Path) -> None:
    before = ChatTokenizer(folder).digest
    assert before == ChatTokenizer(folder).digest
    configure(folder, chat_template="other")
    assert ChatTokenizer(folder).digest != before


def test_smollm2_template(folder: Path) -> None:
    shutil.copy(GOLDEN / "smollm2_chat_template.jinja", folder / "chat_template.jinja")
    assert ChatTokenizer(folder).render_chat(HELLO) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n"
    )


# --- bad input ---


def test_no_template(folder: Path) -> None:
    configure(folder, bos_token="<s>")
    with pytest.raises(ConfigError, match=r"has no chat template .*Add one there, or ask plain text"):
        ChatTokenizer(folder).encode_chat(HELLO)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ raise_exception('Conversation roles must alternate') }}",
            "TemplateError: Conversation roles must alternate",
        ),
        ("{{ tools[0].name }}", "UndefinedError"),
        ("{% for tool in tools %}{{ tool }}{% endfor %}", "TypeError: 'NoneType' object is not iterable"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", r"SecurityError|UndefinedError"),
    ],
)
def test_templates_that_fail(folder: Path, template: str, message: str) -> None:
    configure(folder, chat_template=template)
    with pytest.raises(ConfigError, match=message) as caught:
        ChatTokenizer(folder).encode_chat(HELLO)
    assert "If it needs a system message, a tool list or other variables" in str(caught.value)
    assert str(folder) in str(caught.value)


def test_folders_without_a_usable_tokenizer(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        ChatTokenizer(folder / "none")
    (folder / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tokenizer_config.json cannot be read"):
        ChatTokenizer(folder)
    (folder / "tokenizer_config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match="must hold a JSON object, not list"):
        ChatTokenizer(folder)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tokenizer.json cannot be loaded"):
        ChatTokenizer(folder)


def test_a_folder_without_settings(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    tokenizer = ChatTokenizer(folder)
    assert tokenizer.template is None
    assert tokenizer.encode("hello") == (0, 3)
