"""Writes the serialized logit processor that SGLang expects: `{"callable": "<hex of a pickle>"}`.

SGLang's client would pickle the class with dill, by value, as bytecode of the client's Python version; a
server on another version cannot run that. This pickle holds source text instead, which any version
compiles. It is assembled from a few opcodes, without the module that could also load one: nothing is ever
unpickled or executed in this process.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

PROCESSOR_FILE = Path(__file__).with_name("forced_processor.py")
CLASS_NAME = "ForcedDecode"

# Opcodes, as the standard library's pickletools documents them.
_PROTO, _STOP = b"\x80", b"."
_EMPTY_DICT, _TUPLE2, _BINUNICODE = b"}", b"\x86", b"X"
_GLOBAL, _REDUCE, _POP = b"c", b"R", b"0"
_BINPUT, _BINGET = b"q", b"h"


def pickle_of_class(source: str, class_name: str) -> bytes:
    """A pickle whose value is the class `class_name` that `source` defines when the loading side executes it.

    As Python it reads: `namespace = {}; exec(source, namespace); return operator.getitem(namespace,
    class_name)`.
    """
    return b"".join(
        [
            _PROTO + b"\x03",  # the oldest protocol with Python 3 names
            _EMPTY_DICT + _BINPUT + b"\x00",  # stack: namespace; kept as memo 0
            _POP,
            _global("builtins", "exec"),
            _text(source),
            _BINGET + b"\x00",
            _TUPLE2 + _REDUCE,  # exec(source, namespace) -> None
            _POP,
            _global("operator", "getitem"),
            _BINGET + b"\x00",
            _text(class_name),
            _TUPLE2 + _REDUCE,  # namespace[class_name]
            _STOP,
        ]
    )


@cache
def serialized_processor() -> str:
    """The request field `custom_logit_processor`; always the same text, so that servers cache it."""
    source = PROCESSOR_FILE.read_text(encoding="utf-8")
    return json.dumps({"callable": pickle_of_class(source, CLASS_NAME).hex()})


def _global(module: str, name: str) -> bytes:
    return _GLOBAL + f"{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    encoded = text.encode()
    return _BINUNICODE + len(encoded).to_bytes(4, "little") + encoded
