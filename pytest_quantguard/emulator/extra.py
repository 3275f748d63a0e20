"""Which packages of the `[emulator]` extra are missing. Imports none of them."""

from __future__ import annotations

import importlib.util

PACKAGES = ("filelock", "gguf", "ml_dtypes", "safetensors", "starlette", "tokenizers", "uvicorn")
INSTALL = "pip install 'pytest-quantguard[emulator]'"


def missing_packages() -> list[str]:
    """The modules of the extra that cannot be imported here."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def explanation(missing: list[str]) -> str:
    """What is missing and the command that installs it."""
    return f"the emulator needs packages that are not installed: {', '.join(missing)}. Run: {INSTALL}"
