"""Text to token ids and back, as SGLang does it, over a model folder's `tokenizer.json`.

Not here: which tokens end a sequence (the model's config) and how answers are laid out (encoding.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_quantguard.errors import ConfigError, ModelError, RequestRejectedError
from pytest_quantguard.prompts.tokenizer import render_template

CONTEXT_TOKENS = 5
"""Prompt tokens decoded in front of the output, so that no leading space is lost or invented (as SGLang)."""


class TextTokenizer:
    """A `tokenizer.json`, the chat template beside it, and single-token texts remembered."""

    def __init__(self, folder: Path) -> None:
        """Load from a model folder. Raises ModelError when a file cannot be read."""
        from tokenizers import Tokenizer

        path = folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception for every defect of the file
            raise ModelError(f"{path} cannot be loaded: {error}") from error
        self._folder = folder
        self._settings = read_settings(folder)
        self._token_texts: dict[int, str] = {}
        self._byte_level = type(self._tokenizer.decoder).__name__ == "ByteLevel"
        self._byte_of = byte_of_character()
        self._added = frozenset(self._tokenizer.get_added_tokens_decoder())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no whole character become U+FFFD."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def decode_output(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        """Text of generated tokens, as they read after the end of the prompt."""
        if not output_ids:
            return ""
        context = list(prompt_ids[-CONTEXT_TOKENS:])
        before = self.decode(context, skip_special_tokens=skip_special_tokens)
        whole = self.decode([*context, *output_ids], skip_special_tokens=skip_special_tokens)
        return whole[len(before) :]

    def token_text(self, token_id: int) -> str:
        """Text of one token, special tokens included."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of one token, also where they are a part of a character."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level and token_id not in self._added and all(char in self._byte_of for char in token):
            return bytes(self._byte_of[char] for char in token)
        return self.token_text(token_id).encode()

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, object] | None = None
    ) -> str:
        """The prompt text of a conversation, through the model's own template, in jinja2's sandbox.

        variables: further ones of the template. Raises RequestRejectedError without a template, without
        jinja2, or when the template refuses.
        """
        template = self._settings.get("chat_template")
        if not isinstance(template, str):
            raise RequestRejectedError("this model has no chat template; send token ids or text to /generate")
        try:
            return render_template(template, messages, self._settings, variables or {}, self._folder)
        except ConfigError as error:
            raise RequestRejectedError(str(error)) from error


def byte_of_character() -> dict[str, int]:
    """Byte-level BPE's alphabet (GPT-2): printable Latin-1 for itself, U+0100 and on for other bytes."""
    itself = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(256 + i): byte for i, byte in enumerate(others)}


def load_tokenizer(folder: Path) -> TextTokenizer | None:
    """The folder's tokenizer, or None when it holds none: then only token ids are served."""
    return TextTokenizer(folder) if (folder / "tokenizer.json").is_file() else None


def read_settings(folder: Path) -> dict[str, Any]:
    """`tokenizer_config.json`, with a template that newer folders keep in a file of its own."""
    settings: dict[str, Any] = {}
    path = folder / "tokenizer_config.json"
    if path.is_file():
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelError(f"{path} is not valid JSON: {error}") from error
    template = folder / "chat_template.jinja"
    if template.is_file():
        settings["chat_template"] = template.read_text(encoding="utf-8")
    if isinstance(settings.get("chat_template"), list):
        named = {entry.get("name"): entry.get("template") for entry in settings["chat_template"]}
        settings["chat_template"] = named.get("default")
    return settings
