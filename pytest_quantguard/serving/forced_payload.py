"""Writes the serialized logit processor that SGLang expects: `{"callable": "<hex of a pickle>"}`.

SGLang's client would pickle the class with dill, by value, as bytecode of the client's Python version; a
server on another version cannot run that. This pickle holds source text instead, which any version
compiles. It is assembled from a few opcodes; nothing is ever unpickled or executed in this process.
"""

from __future__ import annotations

import json
import pickle
from functools import cache
from pathlib import Path

PROCESSOR_FILE = Path(__file__).with_name("forced_processor.py")
CLASS_NAME = "ForcedDecode"


def pickle_of_class(source: str, class_name: str) -> bytes:
    """A pickle whose value is the class `class_name` that `source` defines when the loading side executes it.

    In Python the pickle reads: `namespace = {}; exec(source, namespace); return operator.getitem(namespace,
    class_name)`.
    """
    return b"".join(
        [
            pickle.PROTO + b"\x03",  # the oldest protocol with Python 3 names
            pickle.EMPTY_DICT + pickle.BINPUT + b"\x00",  # stack: namespace; kept as memo 0
            pickle.POP,
            _global("builtins", "exec"),
            _text(source),
            pickle.BINGET + b"\x00",
            pickle.TUPLE2 + pickle.REDUCE,  # exec(source, namespace) -> None
            pickle.POP,
            _global("operator", "getitem"),
            pickle.BINGET + b"\x00",
            _text(class_name),
            pickle.TUPLE2 + pickle.REDUCE,  # namespace[class_name]
            pickle.STOP,
        ]
    )


@cache
def serialized_processor() -> str:
    """The request field `custom_logit_processor`; always the same text, so that servers cache it."""
    source = PROCESSOR_FILE.read_text(encoding="utf-8")
    return json.dumps({"callable": pickle_of_class(source, CLASS_NAME).hex()})


def _global(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    encoded = text.encode()
    return pickle.BINUNICODE + len(encoded).to_bytes(4, "little") + encoded
