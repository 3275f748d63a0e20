"""Whether a server shows any sign of quantization: in what it says of itself, and in its model folder."""

from __future__ import annotations

from pytest_quantguard.serving.answers import Capabilities
from pytest_quantguard.serving.probe import checkpoint_files, model_config

ARGUMENTS = ("quantization", "torchao_config", "modelopt_quant", "quantization_param_path")
"""Arguments of SGLang that quantize a model, each absent or empty where nothing is quantized."""
PLAIN_CACHES = (None, "auto", "bf16", "bfloat16", "float16", "float32")
PLAIN_LOADERS = (None, "auto", "safetensors", "pt", "npcache", "mistral", "layered", "dummy")
"""Load formats that bring no quantization of their own (`gguf` and `bitsandbytes` do)."""
CONFIG_KEYS = ("quantization_config", "compression_config")
QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")


def why_unquantized(found: Capabilities) -> str | None:
    """The evidence that nothing is quantized; None where there is a sign of it, or one cannot look.

    Without the model's `config.json` on this machine there is no evidence: a server that loads a quantized
    checkpoint need not say so.
    """
    arguments = found.server_args
    if "quantization" not in arguments or any(arguments.get(name) for name in ARGUMENTS):
        return None
    if found.kv_cache_dtype not in PLAIN_CACHES or arguments.get("load_format") not in PLAIN_LOADERS:
        return None
    config = model_config(found.model_path, arguments.get("revision"))
    if not config or any(config.get(key) for key in CONFIG_KEYS):
        return None
    if checkpoint_files(found.model_path, arguments.get("revision"), QUANTIZATION_FILES):
        return None
    return (
        f"/server_info reports quantization {arguments['quantization']!r} and KV cache "
        f"{found.kv_cache_dtype!r}, and the model folder of {found.model_path!r} has no quantization_config "
        "in config.json and no hf_quant_config.json"
    )
