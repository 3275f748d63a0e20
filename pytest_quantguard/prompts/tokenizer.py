"""Text and conversations to token ids, with a model folder's own tokenizer and chat template.

For prompts that are made on this side of the wire: chat prompts, and lengths in tokens. What is asked of a
server is always the ids. Needs the `tokenizers` package, and jinja2 for chat templates: both come with `pip
install 'pytest-quantguard[emulator]'`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_quantguard.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

INSTALL = "pip install 'pytest-quantguard[emulator]'"
TEMPLATE_FILE = "chat_template.jinja"
TODAY = datetime(2025, 1, 1)
"""What templates that write the date are told, so that a prompt has the same ids every day."""

Message = Mapping[str, str]
"""{"role": "user", "content": "..."}"""


class ChatTokenizer:
    """The tokenizer of a model folder, with its chat template if it has one."""

    def __init__(self, folder: Path) -> None:
        """Read `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`.

        Raises ConfigError where the folder has no tokenizer, or one that cannot be read.
        """
        self.folder = folder
        self._tokenizer = _load_tokenizer(folder / "tokenizer.json")
        self._settings = _read_settings(folder)
        self.bos_token = _token_text(self._settings.get("bos_token"))
        self.template = _find_template(folder, self._settings)

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of tokenizer and template: other ids for the same text mean another digest."""
        content = (self.folder / "tokenizer.json").read_bytes() + (self.template or "").encode()
        return hashlib.sha256(content).hexdigest()

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a plain text, with the special tokens that the tokenizer itself adds (at most one BOS)."""
        ids = self._tokenizer.encode(text, add_special_tokens=not self._begins_with_bos(text)).ids
        return tuple(ids)

    def count(self, text: str) -> int:
        """Number of tokens of a plain text, without special tokens."""
        return len(self.encode_plain(text))

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """Ids of a text alone, without any special token that it does not write itself."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are no whole character become U+FFFD."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def encode_chat(self, messages: Sequence[Message], **variables: object) -> tuple[int, ...]:
        """Ids of a conversation up to where the assistant's answer begins, through the chat template.

        variables: further template variables, such as `enable_thinking=False`. Raises ConfigError where there
        is no template, or where it fails.
        """
        text = self.render_chat(messages, **variables)
        # The template writes all special tokens itself; the tokenizer would add a second BOS.
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def render_chat(self, messages: Sequence[Message], **variables: object) -> str:
        """The text of a conversation up to where the assistant's answer begins."""
        if self.template is None:
            raise ConfigError(
                f"The tokenizer of {self.folder} has no chat template (neither chat_template.jinja nor "
                "chat_template in tokenizer_config.json). Add one there, or ask plain text instead of chat."
            )
        return render_template(self.template, messages, self._settings, variables, self.folder)

    def _begins_with_bos(self, text: str) -> bool:
        return bool(self.bos_token) and text.startswith(self.bos_token)


def _load_tokenizer(path: Path) -> Tokenizer:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(f"Reading a tokenizer needs the package tokenizers: {INSTALL}") from error
    if not path.is_file():
        raise ConfigError(
            f"{path.parent} has no tokenizer.json. Name a model folder with a fast tokenizer; "
            "one can be written with AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER)."
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises Exception itself for every defect of the file
        raise ConfigError(f"{path} cannot be loaded: {error}") from error


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(settings).__name__}")
    return settings


def _find_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The template's own file comes first, as in Hugging Face's loader; of several named ones, `default`."""
    if (folder / TEMPLATE_FILE).is_file():
        return (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _token_text(setting: object) -> str:
    """A special token: a string, or an object with `content`."""
    if isinstance(setting, Mapping):
        setting = setting.get("content")
    return setting if isinstance(setting, str) else ""


def render_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    variables: Mapping[str, object],
    folder: Path,
) -> str:
    """The text of a conversation, rendered as Hugging Face does: jinja2's immutable sandbox, trimmed blocks,
    `raise_exception`, `strftime_now`, the special tokens of `tokenizer_config.json` (settings).

    variables: override what the template is told, `add_generation_prompt` (True) and `tools` (None) included.
    folder: for messages. Raises ConfigError for whatever the template does.
    """
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ConfigError(f"Chat templates need the package jinja2: {INSTALL}") from error

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = TODAY.strftime
    special = {
        name: _token_text(settings.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")
    }
    values = {
        "messages": list(messages),
        "add_generation_prompt": True,
        "tools": None,
        **special,
        **variables,
    }
    try:
        return environment.from_string(template).render(values)
    except Exception as error:  # a template is a program of the model's author and can fail in any way
        raise ConfigError(
            f"The chat template of {folder} fails on these messages: {type(error).__name__}: {error}. "
            "If it needs a system message, a tool list or other variables, give them; or ask plain text."
        ) from error
