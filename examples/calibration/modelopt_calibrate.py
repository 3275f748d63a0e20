"""Quantizes a model with NVIDIA ModelOpt, calibrated with a set made by `quantguard calibration-set`.

    quantguard calibration-set --like eval.jsonl --size 512 --max-tokens 2048 --output calibration.jsonl
    python modelopt_calibrate.py --model Qwen/Qwen3-8B --calibration calibration.jsonl \
        --format nvfp4 --kv-cache fp8 --output Qwen3-8B-NVFP4

Needs a GPU and: pip install nvidia-modelopt transformers accelerate
The folder that is written is served by SGLang with --quantization modelopt_fp4 (or modelopt_fp8).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FORMATS = {"nvfp4": "NVFP4_DEFAULT_CFG", "fp8": "FP8_DEFAULT_CFG"}
KV_CACHES = {"none": None, "fp8": "FP8_KV_CFG"}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Quantize with ModelOpt on a calibration set of quantguard.")
    parser.add_argument("--model", required=True, help="Hugging Face name or folder of the BF16 model")
    parser.add_argument("--calibration", required=True, type=Path, help="JSONL with a `text` per line")
    parser.add_argument("--output", required=True, type=Path, help="folder to write")
    parser.add_argument("--format", choices=FORMATS, default="nvfp4")
    parser.add_argument("--kv-cache", choices=KV_CACHES, default="fp8")
    parser.add_argument("--max-tokens", type=int, default=2048, help="longer texts are cut")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--chat", action="store_true", help="put each text into the model's chat template")
    parsed = parser.parse_args(arguments)
    if parsed.max_tokens < 1 or parsed.batch_size < 1:
        parser.error("--max-tokens and --batch-size must be at least 1")
    return parsed


def read_texts(path: Path) -> list[str]:
    with path.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines if line.strip()]
    if not texts:
        raise SystemExit(f"{path} holds no texts")
    return texts


def calibration_loop(
    texts: Sequence[str], tokenizer: Any, arguments: argparse.Namespace
) -> Callable[[Any], None]:
    """What ModelOpt calls with the model: it watches the activations of every batch."""

    def run(model: Any) -> None:
        for start in range(0, len(texts), arguments.batch_size):
            batch = list(texts[start : start + arguments.batch_size])
            inputs = tokenizer(
                batch,
                return_tensors="pt",
                padding=True,
                truncation=True,
                max_length=arguments.max_tokens,
                # A chat template writes the special tokens itself.
                add_special_tokens=not arguments.chat,
            )
            model(**inputs.to(model.device))

    return run


def main() -> None:
    arguments = parse_arguments()
    texts = read_texts(arguments.calibration)

    import copy

    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if arguments.chat:
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
            for text in texts
        ]
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, torch_dtype=torch.bfloat16, device_map="auto"
    )
    config = copy.deepcopy(getattr(mtq, FORMATS[arguments.format]))
    if KV_CACHES[arguments.kv_cache] is not None:
        cache = copy.deepcopy(getattr(mtq, KV_CACHES[arguments.kv_cache])["quant_cfg"])
        config = mtq.update_quant_cfg_with_kv_cache_quant(config, cache)
    with torch.inference_mode():
        model = mtq.quantize(model, config, calibration_loop(texts, tokenizer, arguments))
        export_hf_checkpoint(model, export_dir=arguments.output)
    tokenizer.save_pretrained(arguments.output)


if __name__ == "__main__":
    main()
