"""Quantizes a model with llm-compressor, calibrated with a set made by `quantguard calibration-set`.

    quantguard calibration-set --like eval.jsonl --size 512 --max-tokens 2048 --output calibration.jsonl
    python llmcompressor_calibrate.py --model Qwen/Qwen3-8B --calibration calibration.jsonl \
        --scheme NVFP4 --kv-cache fp8 --output Qwen3-8B-NVFP4

Needs a GPU and: pip install llmcompressor transformers datasets
The folder that is written holds compressed-tensors weights, which SGLang recognises by itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCHEMES = ("NVFP4", "FP8", "FP8_DYNAMIC", "NVFP4A16")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Quantize with llm-compressor on a calibration set of quantguard."
    )
    parser.add_argument("--model", required=True, help="Hugging Face name or folder of the BF16 model")
    parser.add_argument("--calibration", required=True, type=Path, help="JSONL with a `text` per line")
    parser.add_argument("--output", required=True, type=Path, help="folder to write")
    parser.add_argument("--scheme", choices=SCHEMES, default="NVFP4")
    parser.add_argument("--kv-cache", choices=["none", "fp8"], default="none")
    parser.add_argument(
        "--ignore", nargs="*", default=["lm_head"], help="modules that stay BF16, 're:' for patterns"
    )
    parser.add_argument("--max-tokens", type=int, default=2048, help="longer texts are cut")
    parser.add_argument("--chat", action="store_true", help="put each text into the model's chat template")
    parsed = parser.parse_args(arguments)
    if parsed.max_tokens < 1:
        parser.error("--max-tokens must be at least 1")
    return parsed


def encode(record: dict[str, Any], tokenizer: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Token ids of one line of the calibration set."""
    text = record["text"]
    if arguments.chat:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
    return dict(
        tokenizer(
            text,
            truncation=True,
            max_length=arguments.max_tokens,
            # A chat template writes the special tokens itself.
            add_special_tokens=not arguments.chat,
        )
    )


def main() -> None:
    arguments = parse_arguments()

    from compressed_tensors.quantization import QuantizationArgs
    from datasets import load_dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, torch_dtype="auto")
    dataset = load_dataset("json", data_files=str(arguments.calibration), split="train")
    dataset = dataset.map(
        lambda record: encode(record, tokenizer, arguments), remove_columns=dataset.column_names
    )
    cache = (
        QuantizationArgs(num_bits=8, type="float", strategy="tensor", dynamic=False, symmetric=True)
        if arguments.kv_cache == "fp8"
        else None
    )
    recipe = QuantizationModifier(
        targets="Linear", scheme=arguments.scheme, ignore=arguments.ignore, kv_cache_scheme=cache
    )
    oneshot(
        model=model,
        dataset=dataset,
        recipe=recipe,
        max_seq_length=arguments.max_tokens,
        num_calibration_samples=len(dataset),
    )
    model.save_pretrained(arguments.output, save_compressed=True)
    tokenizer.save_pretrained(arguments.output)


if __name__ == "__main__":
    main()
