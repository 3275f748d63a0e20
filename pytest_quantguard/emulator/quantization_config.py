"""What a published quantized checkpoint says of itself: which module is stored how, and the key/value cache.

Understands ModelOpt (`hf_quant_config.json`, or `quantization_config` in `config.json`), compressed-tensors,
and the block-scaled `fp8` of DeepSeek and Qwen3. Reads configs only; `published.py` reads the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from pytest_quantguard.emulator.formats.fp8 import WeightGranularity
from pytest_quantguard.emulator.model_config import read_json
from pytest_quantguard.errors import ModelError

Method = Literal["modelopt", "compressed-tensors", "fp8"]
ActivationRule = Literal["none", "static", "dynamic"]


@dataclass(frozen=True)
class StoredScheme:
    """How one linear layer is stored and computed.

    name: one of the formats' names, or `fp8_static` for FP8 with a static activation scale. granularity: of
    FP8 weights. activation: static uses the checkpoint's input scale.
    """

    name: str
    weights: Literal["nvfp4", "fp8"]
    granularity: WeightGranularity = "tensor"
    activation: ActivationRule = "static"


NVFP4 = StoredScheme("nvfp4", "nvfp4")
NVFP4_W4A16 = StoredScheme("nvfp4_w4a16", "nvfp4", activation="none")
FP8_STATIC = StoredScheme("fp8_static", "fp8")
FP8_PER_CHANNEL = StoredScheme("fp8_per_channel", "fp8", "channel", "dynamic")
FP8_BLOCK = StoredScheme("fp8_block", "fp8", "block", "dynamic")

_MODELOPT_ALGORITHMS: Mapping[str, StoredScheme] = {
    "FP8": FP8_STATIC,
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4_W4A16,
    "FP8_PER_CHANNEL_PER_TOKEN": FP8_PER_CHANNEL,
    "FP8_PB_WO": FP8_BLOCK,
}
_MODELOPT_MIXED = "MIXED_PRECISION"


@dataclass(frozen=True)
class QuantizationConfig:
    """schemes: by linear layer, None where it stays unquantized. kv_cache: `bf16` or `fp8_e4m3`. path: the
    file."""

    method: Method
    schemes: Mapping[str, StoredScheme | None]
    kv_cache: str
    path: Path


def read_quantization_config(folder: Path, modules: Sequence[str]) -> QuantizationConfig | None:
    """The folder's quantization, for the linear layers `modules`; None for an unquantized folder.

    Raises ModelError naming file and key for a method, algorithm or group size that is not supported.
    """
    config = read_json(folder, "config.json")
    section = config.get("quantization_config") or config.get("compression_config")
    if (folder / "hf_quant_config.json").is_file():
        raw = read_json(folder, "hf_quant_config.json").get("quantization")
        return _modelopt(_object(raw, folder / "hf_quant_config.json", "quantization"), folder, modules)
    if section is None:
        return None
    path = folder / "config.json"
    raw = _object(section, path, "quantization_config")
    method = raw.get("quant_method")
    if method == "modelopt" or str(method).startswith("modelopt_"):
        return _modelopt(raw, folder, modules, path)
    if method == "compressed-tensors":
        return _compressed_tensors(raw, path, modules)
    if method == "fp8":
        return _block_fp8(raw, path, modules)
    raise _unsupported(
        path, "quantization_config.quant_method", method, ("modelopt", "compressed-tensors", "fp8")
    )


def matches(pattern: str, module: str) -> bool:
    """Whether an entry of an exclusion list covers a module.

    `re:` starts a regular expression that matches from the start (compressed-tensors); otherwise `*` matches
    anything, and a name covers itself and everything below it.
    """
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return fnmatchcase(module, pattern) or module.startswith(pattern + ".")


def _modelopt(
    raw: Mapping[str, Any], folder: Path, modules: Sequence[str], path: Path | None = None
) -> QuantizationConfig:
    path = path or folder / "hf_quant_config.json"
    algorithm = raw.get("quant_algo")
    excluded = _strings(raw.get("exclude_modules", raw.get("ignore")), path, "exclude_modules")
    schemes: dict[str, StoredScheme | None] = dict.fromkeys(modules)
    if algorithm == _MODELOPT_MIXED:
        layers = _object(raw.get("quantized_layers"), path, "quantized_layers")
        for module in modules:
            if module in layers:
                entry = _object(layers[module], path, f"quantized_layers.{module}")
                schemes[module] = _modelopt_scheme(entry, path, f"quantized_layers.{module}")
    elif algorithm is not None:
        scheme = _modelopt_scheme(raw, path, "quant_algo")
        schemes = {name: None if _excluded(name, excluded) else scheme for name in modules}
    return QuantizationConfig("modelopt", schemes, _modelopt_kv_cache(raw, path), path)


def _modelopt_scheme(raw: Mapping[str, Any], path: Path, key: str) -> StoredScheme:
    algorithm = raw.get("quant_algo")
    scheme = _MODELOPT_ALGORITHMS.get(str(algorithm))
    if scheme is None:
        raise _unsupported(path, key, algorithm, (*_MODELOPT_ALGORITHMS, _MODELOPT_MIXED))
    group_size = raw.get("group_size")
    if scheme.weights == "nvfp4" and group_size is not None:
        _check_group_size(group_size, 16, path, "group_size")
    return scheme


def _modelopt_kv_cache(raw: Mapping[str, Any], path: Path) -> str:
    if raw.get("kv_cache_scheme") is not None:
        return _kv_cache_scheme(raw["kv_cache_scheme"], path)
    algorithm = raw.get("kv_cache_quant_algo")
    if algorithm is None:
        return "bf16"
    if algorithm != "FP8":
        raise _unsupported(path, "kv_cache_quant_algo", algorithm, ("FP8",))
    return "fp8_e4m3"


def _compressed_tensors(raw: Mapping[str, Any], path: Path, modules: Sequence[str]) -> QuantizationConfig:
    ignored = _strings(raw.get("ignore"), path, "quantization_config.ignore")
    groups = _object(raw.get("config_groups"), path, "quantization_config.config_groups")
    schemes: dict[str, StoredScheme | None] = dict.fromkeys(modules)
    for name, value in groups.items():
        key = f"quantization_config.config_groups.{name}"
        group = _object(value, path, key)
        scheme = _compressed_scheme(group, str(group.get("format") or raw.get("format")), path, key)
        targets = _strings(group.get("targets"), path, f"{key}.targets")
        for module in modules:
            targeted = any(target == "Linear" or matches(target, module) for target in targets)
            if targeted and not _excluded(module, ignored):
                schemes[module] = scheme
    cache = raw.get("kv_cache_scheme")
    kv_cache = "bf16" if cache is None else _kv_cache_scheme(cache, path)
    return QuantizationConfig("compressed-tensors", schemes, kv_cache, path)


def _compressed_scheme(group: Mapping[str, Any], kind: str, path: Path, key: str) -> StoredScheme:
    weights = _object(group.get("weights"), path, f"{key}.weights")
    inputs = group.get("input_activations")
    activation: ActivationRule = "none"
    if inputs is not None:
        dynamic = _object(inputs, path, f"{key}.input_activations").get("dynamic")
        activation = "dynamic" if dynamic is True else "static"
    if kind == "nvfp4-pack-quantized":
        _check_group_size(weights.get("group_size"), 16, path, f"{key}.weights.group_size")
        # "local" means dynamic block scales under a static global scale, which is NVFP4's usual way.
        return NVFP4_W4A16 if inputs is None else NVFP4
    if kind != "float-quantized":
        raise _unsupported(path, f"{key}.format", kind, ("nvfp4-pack-quantized", "float-quantized"))
    if weights.get("num_bits") != 8 or weights.get("type") != "float":
        found = f"{weights.get('num_bits')}-bit {weights.get('type')}"
        raise _unsupported(path, f"{key}.weights", found, ("8-bit float",))
    strategy = weights.get("strategy")
    if strategy == "block":
        blocks = weights.get("block_structure")
        if blocks != [128, 128]:
            raise _unsupported(path, f"{key}.weights.block_structure", blocks, ("[128, 128]",))
        return FP8_BLOCK
    if strategy not in ("tensor", "channel"):
        raise _unsupported(path, f"{key}.weights.strategy", strategy, ("tensor", "channel", "block"))
    return StoredScheme(_fp8_name(strategy, activation), "fp8", strategy, activation)


def _fp8_name(strategy: Literal["tensor", "channel"], activation: ActivationRule) -> str:
    if activation == "static":
        return "fp8_static"
    if activation == "none":
        return "fp8_w8a16"
    return "fp8" if strategy == "tensor" else "fp8_per_channel"


def _block_fp8(raw: Mapping[str, Any], path: Path, modules: Sequence[str]) -> QuantizationConfig:
    """`quant_method: fp8` with 128x128 weight blocks and dynamic activations."""
    block = raw.get("weight_block_size")
    if block != [128, 128]:
        raise _unsupported(path, "quantization_config.weight_block_size", block, ("[128, 128]",))
    kept = (
        "lm_head",
        *_strings(raw.get("modules_to_not_convert"), path, "quantization_config.modules_to_not_convert"),
    )
    schemes = {name: None if _excluded(name, kept) else FP8_BLOCK for name in modules}
    return QuantizationConfig("fp8", schemes, "bf16", path)


def _kv_cache_scheme(value: object, path: Path) -> str:
    scheme = _object(value, path, "kv_cache_scheme")
    found = f"{scheme.get('num_bits')}-bit {scheme.get('type')}, dynamic: {scheme.get('dynamic')}"
    if scheme.get("num_bits") != 8 or scheme.get("type") != "float" or scheme.get("dynamic"):
        raise _unsupported(path, "kv_cache_scheme", found, ("8-bit float, static",))
    return "fp8_e4m3"


def _excluded(module: str, patterns: Iterable[str]) -> bool:
    return any(matches(pattern, module) for pattern in patterns)


def _check_group_size(found: object, expected: int, path: Path, key: str) -> None:
    if found != expected:
        raise ModelError(
            f"{path}: key {key!r}: NVFP4 has a scale for every {expected} elements, found {found!r}"
        )


def _object(value: object, path: Path, key: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ModelError(f"{path}: key {key!r}: expected an object, found {value!r}")
    return value


def _strings(value: object, path: Path, key: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ModelError(f"{path}: key {key!r}: expected a list of names, found {value!r}")
    for item in value:
        try:
            re.compile(item.removeprefix("re:") if item.startswith("re:") else "")
        except re.error as error:
            raise ModelError(f"{path}: key {key!r}: {item!r} is no regular expression: {error}") from error
    return tuple(value)


def _unsupported(path: Path, key: str, found: object, known: Sequence[str]) -> ModelError:
    return ModelError(
        f"{path}: key {key!r}: {found!r} is not supported by the emulator; supported: {', '.join(known)}"
    )
