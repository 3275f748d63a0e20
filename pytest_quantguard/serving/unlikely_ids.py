"""Finds token ids that a model hardly ever predicts: padding rows of the vocabulary and unused special
tokens.

Forced decode sacrifices two of them per prompt (see `forced`): their own log-probabilities are lost.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import orjson

from pytest_quantguard.errors import ServerError
from pytest_quantguard.serving.transport import Transport

SPECIAL = re.compile(r"[<\[]\S+[>\]]")
LIKELY = re.compile(r"end|eo[stm]|im_|bo[st]|^</?s>$|start|user|assistant|system|think|tool", re.IGNORECASE)
"""Special tokens that chat models do predict."""
LISTED = 64
"""How many ids at either end of the vocabulary are looked at where there is no tokenizer file."""


def unlikely_ids(transport: Transport, model_path: str | None, vocab_size: int) -> tuple[int, ...]:
    """Ids in order of preference: padding rows first, then special tokens that chat models do not use.

    From the model folder's tokenizer.json where it is on this machine, else from the server's /detokenize.
    """
    texts = _texts_of_folder(model_path, vocab_size)
    if texts is None:
        texts = _texts_of_server(transport, vocab_size)
    padding = [token for token, text in texts.items() if text == ""]
    special = [token for token, text in texts.items() if SPECIAL.fullmatch(text) and not LIKELY.search(text)]
    return (*padding, *special)


def _texts_of_folder(model_path: str | None, vocab_size: int) -> dict[int, str] | None:
    """Text of the added tokens, and "" for rows beyond the tokenizer; None without a readable
    tokenizer.json."""
    if not model_path:
        return None
    try:
        tokenizer: Any = json.loads((Path(model_path) / "tokenizer.json").read_text(encoding="utf-8"))
        added = {int(token["id"]): str(token["content"]) for token in tokenizer.get("added_tokens", ())}
        ids = tokenizer["model"]["vocab"].values()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    known = max((*ids, *added), default=-1) + 1
    return dict.fromkeys(range(known, min(known + LISTED, vocab_size)), "") | {
        token: text for token, text in sorted(added.items()) if token < vocab_size
    }


def _texts_of_server(transport: Transport, vocab_size: int) -> dict[int, str]:
    ids = sorted({*range(max(0, vocab_size - LISTED), vocab_size), *range(min(LISTED, vocab_size))})
    payload = {"model": "default", "tokens": [[token] for token in ids], "skip_special_tokens": False}
    try:
        texts = orjson.loads(transport.post("/detokenize", payload, what="POST /detokenize")).get("text")
    except (ServerError, orjson.JSONDecodeError, AttributeError):
        return {}  # forced decode then says that it found no ids to use
    if not isinstance(texts, list) or len(texts) != len(ids):
        return {}
    return {token: str(text) for token, text in zip(ids, texts, strict=True)}
