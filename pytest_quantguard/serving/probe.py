"""What a server says of itself: version, model, quantization, capabilities. Reads, never judges.

Newer and older route names are tried; what a server does not say stays None.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from pytest_quantguard.errors import RequestRejectedError
from pytest_quantguard.serving.answers import Capabilities, ForcedDecode
from pytest_quantguard.serving.command import SECRET, mask
from pytest_quantguard.serving.transport import Transport

PROBE_TIMEOUT = 30.0
PLAIN_NAME = re.compile(r"\w[\w.-]*")
NOT_ARGUMENTS = frozenset({"internal_states", "startup_time", "kv_events", "hicache_object_layout"})
"""Parts of /server_info that are measurements of the running server, not its arguments."""


def read_capabilities(transport: Transport) -> Capabilities:
    """Ask /server_info, /model_info, /v1/models and /openapi.json; ServerErrors where nothing answers."""
    info = _first_of(transport, "/server_info", "/get_server_info")
    model = _first_of(transport, "/model_info", "/get_model_info")
    if info is None and model is None:
        raise RequestRejectedError(
            f"{transport.url} answers neither /server_info nor /model_info, so it is no SGLang server; is "
            "the url right?"
        )
    info, model = info or {}, model or {}
    schema = _first_of(transport, "/openapi.json") or {}
    emulator = info.get("quantguard_emulator")
    own = emulator if isinstance(emulator, dict) else {}
    model_path = _text(info.get("model_path") or model.get("model_path"))
    config = model_config(model_path, _text(info.get("revision")))
    return Capabilities(
        kind="emulator" if own else "sglang" if "version" in info else "unknown",
        version=_text(own.get("version") or info.get("version")),
        model_path=model_path,
        dtype=_text(info.get("dtype")),
        quantization=_text(info.get("quantization")),
        kv_cache_dtype=_text(info.get("kv_cache_dtype")),
        vocab_size=_integer(own.get("vocab_size")) or _integer(info.get("vocab_size")) or _vocab_size(config),
        context_length=_context_length(transport, info),
        flat_logprobs="return_flat_raw_top_logprobs" in _generate_fields(schema),
        forced_decode=_forced_decode(info, own),
        deterministic=_boolean(info.get("enable_deterministic_inference")),
        radix_cache=_negated(info.get("disable_radix_cache")),
        chunked_prefill_size=_integer(info.get("chunked_prefill_size")),
        device=_text(info.get("device")),
        server_args=_without_secrets({key: info[key] for key in info if key not in NOT_ARGUMENTS}),
    )


def model_config(model_path: str | None, revision: str | None = None) -> Mapping[str, Any]:
    """`config.json` of a model folder, or of Hugging Face's cache on this machine; empty without either."""
    for path in checkpoint_files(model_path, revision, ("config.json",)):
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(config, dict):
            return config
    return {}


def checkpoint_files(model_path: str | None, revision: str | None, names: Sequence[str]) -> list[Path]:
    """Which of the named files the model folder (or its copy in Hugging Face's cache) has."""
    try:
        return [
            folder / name
            for folder in _model_folders(model_path, revision)
            for name in names
            if (folder / name).is_file()
        ]
    except (OSError, ValueError):  # A server may name what no path can be.
        return []


def _model_folders(model_path: str | None, revision: str | None) -> list[Path]:
    if not isinstance(model_path, str) or not model_path:
        return []
    folder = Path(model_path)
    if folder.is_dir():
        return [folder]
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    snapshots = hub / f"models--{model_path.replace('/', '--')}" / "snapshots"
    # A server says the revision: it must name a folder here, and be no pattern that searches the whole disk.
    plain = isinstance(revision, str) and PLAIN_NAME.fullmatch(revision) is not None
    return sorted(snapshots.glob(str(revision) if plain else "*")) if plain or not revision else []


def _vocab_size(config: Mapping[str, Any]) -> int | None:
    text_config = config.get("text_config")
    nested = text_config if isinstance(text_config, dict) else {}
    return _integer(config.get("vocab_size")) or _integer(nested.get("vocab_size"))


def _context_length(transport: Transport, info: Mapping[str, Any]) -> int | None:
    models = (_first_of(transport, "/v1/models") or {}).get("data")
    first = models[0] if isinstance(models, list) and models else None
    listed = first.get("max_model_len") if isinstance(first, dict) else None
    return _integer(info.get("context_length")) or _integer(listed)


def _forced_decode(info: Mapping[str, Any], emulator: Mapping[str, Any]) -> ForcedDecode | None:
    if emulator:
        return "emulator_field" if emulator.get("forced_output_ids") else None
    # With speculative decoding a pass verifies several tokens, so that one forced token a pass is not
    # defined.
    if info.get("enable_custom_logit_processor") is True and not info.get("speculative_algorithm"):
        return "custom_logit_processor"
    return None


def _generate_fields(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        fields = schema["components"]["schemas"]["GenerateReqInput"]["properties"]
    except (KeyError, TypeError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _without_secrets(info: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang tells its API key to whoever has it, also in `launch_command`; results must not repeat it."""
    named = {value for name, value in info.items() if SECRET.search(name) and isinstance(value, str)}
    command = str(info.get("launch_command") or "").replace("=", " ").split()
    given = {
        value for flag, value in itertools.pairwise(command) if flag.startswith("--") and SECRET.search(flag)
    }
    secrets = sorted((secret for secret in named | given if len(secret) >= 3), key=len, reverse=True)
    return {name: _masked(value, secrets) for name, value in info.items()}


def _masked(value: Any, secrets: Sequence[str]) -> Any:
    if isinstance(value, str):
        return mask(value, secrets)
    if isinstance(value, Mapping):
        return {name: _masked(item, secrets) for name, item in value.items()}
    if isinstance(value, list):
        return [_masked(item, secrets) for item in value]
    return value


def _first_of(transport: Transport, *routes: str) -> dict[str, Any] | None:
    """The JSON object of the first route that exists."""
    for route in routes:
        answer = transport.probe(route, timeout=PROBE_TIMEOUT)
        if answer is None:
            transport.get(route, timeout=PROBE_TIMEOUT)  # raises with the reason
            continue
        status, body = answer
        if status in (404, 405):
            continue
        if status != 200:
            transport.accept(status, body, route, f"GET {route}")
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError:
            continue
        if isinstance(value, dict):
            return value
    return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _boolean(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _negated(value: Any) -> bool | None:
    return not value if isinstance(value, bool) else None
