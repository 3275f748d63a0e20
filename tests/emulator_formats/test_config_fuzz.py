"""No value of any key of a model's JSON files gives anything but a model or a readable refusal."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_quantguard.emulator.layout import linear_shapes
from pytest_quantguard.emulator.model_config import ModelConfig
from pytest_quantguard.emulator.quantization_config import read_quantization_config
from pytest_quantguard.errors import ModelError

from .folders import STORED, copy_folder
from .test_published import NVFP4_GROUP

ODD_VALUES = [None, True, -1, 0, 2.5, 10**30, "x", "re:(", [], ["re:("], [None], [[1]], {}, {"x": 1}]
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            **NVFP4_GROUP,
            "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
        },
        "group_1": {**NVFP4_GROUP, "format": "nvfp4-pack-quantized", "targets": ["re:.*mlp.*"]},
    },
    "ignore": ["lm_head"],
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
}
MIXED = {
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {"lm_head": {"quant_algo": "NVFP4", "group_size": 16}},
    "kv_cache_quant_algo": "FP8",
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside a JSON document."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def replaced(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(document)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("config.json", None),
        ("config.json", COMPRESSED),
        (
            "config.json",
            {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["x"]},
        ),
        (
            "config.json",
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]},
        ),
        ("hf_quant_config.json", {"quantization": MIXED}),
        ("generation_config.json", {"eos_token_id": [2, 3]}),
    ],
    ids=["model", "compressed-tensors", "fp8", "modelopt", "modelopt-mixed", "generation"],
)
def test_odd_values_are_refused_with_a_message(
    tmp_path: Path, name: str, section: dict[str, Any] | None
) -> None:
    folder = copy_folder("modelopt-nvfp4-tiny", tmp_path)
    if name == "config.json":
        (folder / "hf_quant_config.json").unlink()
    base = json.loads((STORED / "modelopt-nvfp4-tiny" / name).read_text(encoding="utf-8"))
    document = (
        base
        if section is None
        else section
        if name != "config.json"
        else {**base, "quantization_config": section}
    )
    served, refusals = 0, []
    for path in places(document):
        for value in ODD_VALUES:
            (folder / name).write_text(json.dumps(replaced(document, path, value)), encoding="utf-8")
            try:
                config = ModelConfig.from_folder(folder)
                read_quantization_config(folder, list(linear_shapes(config)))
                served += 1
            except ModelError as error:
                refusals.append(str(error))
    assert served
    assert refusals
    assert [text for text in refusals if str(folder) not in text] == []
