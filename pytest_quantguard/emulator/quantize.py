"""Which module gets which number format: from one scheme's name, or from ordered patterns (mixed precision).

Decides names only; the formats do the arithmetic.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from pytest_quantguard.emulator.formats import FORMATS, KV_CACHE_FORMATS, Format
from pytest_quantguard.errors import ConfigError

KV_CACHE_KEY = "kv_cache"
"""The pattern that sets the format of the key/value cache instead of a module's."""

KEPT_MODULES = ("lm_head",)
"""Stay at the compute type's precision unless a pattern names a format for them."""

_KV_CACHE_NAMES = {**{name: name for name in KV_CACHE_FORMATS}, "bfloat16": "bf16"}


@dataclass(frozen=True)
class QuantizationPlan:
    """formats: by module name, for every linear layer. kv_cache: None where the patterns do not say."""

    formats: Mapping[str, str]
    kv_cache: str | None


def plan_quantization(
    quantization: str | Mapping[str, str] | None, modules: Sequence[str]
) -> QuantizationPlan:
    """Choose the format of every linear layer in `modules` (names as in Hugging Face, without ".weight").

    quantization: None for none; a format's name for all layers but `lm_head`; or patterns in order,
    shell-style (`*` also spans dots), of which the last that matches a module decides. A module that no
    pattern matches stays unquantized. The key `kv_cache` sets the cache's format.

    Raises ConfigError for an unknown format, a pattern that matches no module, and one that later patterns
    override for all its modules.
    """
    if quantization is None or isinstance(quantization, str):
        name = quantization or "bf16"
        check_format(name, "quantization")
        return QuantizationPlan(
            {module: "bf16" if module in KEPT_MODULES else name for module in modules}, None
        )
    kv_cache = None
    deciding: dict[str, str] = {}
    for pattern, name in quantization.items():
        if pattern == KV_CACHE_KEY:
            kv_cache = kv_cache_format(name, f"quantization: {KV_CACHE_KEY}")
            continue
        check_format(name, f"quantization: {pattern}")
        matched = [module for module in modules if fnmatchcase(module, pattern)]
        if not matched:
            raise ConfigError(
                f"quantization: the pattern {pattern!r} matches no linear layer; {_nearest(pattern, modules)}"
            )
        deciding.update(dict.fromkeys(matched, pattern))
    winners = set(deciding.values())
    for pattern in quantization:
        if pattern != KV_CACHE_KEY and pattern not in winners:
            raise ConfigError(
                f"quantization: the pattern {pattern!r} never takes effect: later patterns match all its "
                "modules (the last match wins); move it down or remove it"
            )
    formats = {module: quantization[deciding[module]] if module in deciding else "bf16" for module in modules}
    return QuantizationPlan(formats, kv_cache)


def check_format(name: str, where: str) -> Format:
    """The format of that name. Raises ConfigError naming the nearest one."""
    if name not in FORMATS:
        close = difflib.get_close_matches(name, FORMATS, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ConfigError(f"{where}: unknown number format {name!r}{hint}; known: {', '.join(FORMATS)}")
    return FORMATS[name]


def kv_cache_format(name: str, where: str) -> str:
    """The canonical name of a key/value cache format. Raises ConfigError listing the known ones."""
    if name not in _KV_CACHE_NAMES:
        known = ", ".join(["auto", *_KV_CACHE_NAMES])
        raise ConfigError(f"{where}: unknown key/value cache format {name!r}; known: {known}")
    return _KV_CACHE_NAMES[name]


def _nearest(pattern: str, modules: Iterable[str]) -> str:
    close = difflib.get_close_matches(pattern, list(modules), n=3, cutoff=0.0)
    return f"nearest modules: {', '.join(close)}"
