"""What the server says of itself: /server_info, /model_info, /v1/models, /v1/loads, /openapi.json.

The names are SGLang's; only those are present whose value means something here. What is the emulator's own
stands under `quantguard_emulator`.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_quantguard import __version__
from pytest_quantguard.emulator.arithmetic import describe_arithmetic
from pytest_quantguard.emulator.options import EmulatorOptions

SGLANG_VERSION = "0.5.23"
"""The version whose protocol is spoken."""

Json = Any


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is known of the model once it is loaded."""

    folder: str
    architecture: str
    vocab_size: int
    context_length: int
    has_tokenizer: bool
    description: str


def server_info(
    options: EmulatorOptions, model: ServedModel, faults: tuple[str, ...], load: tuple[int, int]
) -> dict[str, Json]:
    """The arguments the server runs with, under SGLang's names."""
    return {
        "model_path": options.model,
        "tokenizer_path": options.model,
        "skip_tokenizer_init": not model.has_tokenizer,
        "context_length": options.context_length,
        "dtype": options.dtype,
        "quantization": options.quantization,
        "kv_cache_dtype": options.kv_cache_dtype,
        "max_running_requests": options.max_running_requests,
        "chunked_prefill_size": options.chunked_prefill_size,
        "page_size": options.page_size,
        "disable_radix_cache": options.disable_radix_cache,
        "disable_overlap_schedule": True,
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "ep_size": 1,
        "nnodes": 1,
        "device": "cpu",
        "host": options.host,
        "port": options.port,
        "api_key": None if options.api_key is None else "<redacted>",
        "served_model_name": options.served_name,
        "weight_version": "default",
        "load_format": "auto",
        "random_seed": 0,
        "stream_interval": 1,
        "enable_metrics": True,
        "enable_custom_logit_processor": False,
        "enable_deterministic_inference": False,
        "speculative_algorithm": None,
        "max_req_input_len": model.context_length - 1,
        "internal_states": [{"effective_max_running_requests_per_dp": options.max_running_requests}],
        "version": f"{SGLANG_VERSION}+quantguard.{__version__}",
        "quantguard_emulator": {
            "version": __version__,
            "protocol": f"sglang {SGLANG_VERSION}",
            "forced_output_ids": True,
            "faults": list(faults),
            "vocab_size": model.vocab_size,
            "context_length": model.context_length,
            "description": model.description,
            "model_folder": model.folder,
            "threads": options.threads,
            "arithmetic": describe_arithmetic(),
            "process_id": os.getpid(),
            "running": load[0],
            "queued": load[1],
        },
    }


def model_info(options: EmulatorOptions, model: ServedModel) -> dict[str, Json]:
    """The answer of /model_info."""
    return {
        "model_path": options.model,
        "served_model_name": options.served_name,
        "tokenizer_path": options.model,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "load_format": "auto",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": model.architecture.removesuffix("ForCausalLM").lower(),
        "architectures": [model.architecture],
    }


def models(options: EmulatorOptions, model: ServedModel) -> dict[str, Json]:
    """The answer of /v1/models."""
    card = {
        "id": options.served_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "sglang",
        "root": options.served_name,
        "parent": None,
        "max_model_len": model.context_length,
    }
    return {"object": "list", "data": [card]}


def loads(options: EmulatorOptions, load: tuple[int, int]) -> dict[str, Json]:
    """The answer of /v1/loads."""
    running, queued = load
    return {
        "timestamp": datetime.datetime.now(datetime.timezone.utc).isoformat(),
        "version": SGLANG_VERSION,
        "accelerator": None,
        "num_accelerators": 1,
        "loads": [
            {
                "timestamp": time.time(),
                "dp_rank": 0,
                "num_running_reqs": running,
                "num_waiting_reqs": queued,
                "max_running_requests": options.max_running_requests,
                "queues": {"waiting": queued, "grammar": 0, "paused": 0, "retracted": 0},
            }
        ],
    }


def openapi(routes: Mapping[str, list[str]], fields: tuple[str, ...]) -> dict[str, Json]:
    """A schema that names the routes and the fields of a /generate body; clients look for fields in it."""
    reference = {"$ref": "#/components/schemas/GenerateReqInput"}
    paths: dict[str, Json] = {
        path: {
            method.lower(): {"responses": {"200": {"description": "Successful Response"}}}
            for method in methods
        }
        for path, methods in routes.items()
    }
    for operation in paths.get("/generate", {}).values():
        operation["requestBody"] = {"content": {"application/json": {"schema": reference}}, "required": True}
    properties: dict[str, Json] = {name: {} for name in fields}
    return {
        "openapi": "3.1.0",
        "info": {"title": "pytest-quantguard emulator", "version": __version__},
        "paths": paths,
        "components": {"schemas": {"GenerateReqInput": {"type": "object", "properties": properties}}},
    }
