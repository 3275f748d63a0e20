"""The emulator's command line: what can be set, what the values mean. Imports nothing heavy."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass

DEFAULT_PORT = 30000
LOOPBACK = ("127.0.0.1", "localhost")


@dataclass(frozen=True, slots=True)
class EmulatorOptions:
    """One server's settings; names as in SGLang.

    quantization: None takes the checkpoint's own format; a scheme; or patterns of module names -> formats,
    the last match winning. threads: None leaves the choice to the machine.
    """

    model: str
    port: int = DEFAULT_PORT
    host: str = "127.0.0.1"
    quantization: str | dict[str, str] | None = None
    kv_cache_dtype: str = "auto"
    dtype: str = "bfloat16"
    faults: tuple[str, ...] = ()
    threads: int | None = None
    disable_radix_cache: bool = False
    chunked_prefill_size: int = 4096
    max_running_requests: int = 48
    page_size: int = 1
    context_length: int | None = None
    api_key: str | None = None
    served_model_name: str | None = None

    @property
    def served_name(self) -> str:
        """The name under which the model is listed."""
        return self.served_model_name or self.model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the emulator's options to a parser, in SGLang's names where SGLang has the option."""
    add = parser.add_argument
    add("--model-path", "--model", dest="model", required=True, metavar="NAME_OR_FOLDER",
        help="smollm2-135m (fetched once) or a Hugging Face folder")  # fmt: skip
    add("--port", type=port, default=DEFAULT_PORT, help="default: %(default)s")
    add("--host", type=loopback, default="127.0.0.1", help="loopback only (default: %(default)s)")
    add("--quantization", "--scheme", dest="quantization", type=quantization, metavar="SCHEME",
        help='a scheme (bf16, nvfp4, nvfp4_w4a16, fp8, ...) or JSON {"pattern": "format"}; '
        "default: as the checkpoint is stored")  # fmt: skip
    add("--kv-cache-dtype", default="auto", help="auto, fp8_e4m3, fp8_e5m2, ... (default: %(default)s)")
    add(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="compute type (default: %(default)s)",
    )
    add("--fault", dest="faults", action="append", default=[], metavar="NAME[:KEY=VALUE,...]",
        help="switch on a defect; repeatable")  # fmt: skip
    add("--threads", type=positive, help="CPU threads; default: all that this process may use")
    add("--disable-radix-cache", action="store_true", help="no prefix cache")
    add(
        "--chunked-prefill-size",
        type=positive,
        default=4096,
        help="tokens per prefill pass (default: %(default)s)",
    )
    add("--max-running-requests", type=positive, default=48, help="sequences at once (default: %(default)s)")
    add(
        "--page-size",
        type=positive,
        default=1,
        help="tokens per page of the prefix cache (default: %(default)s)",
    )
    add("--context-length", type=positive, help="default: the model's")
    add("--api-key", default=os.environ.get("QUANTGUARD_EMULATOR_API_KEY"),
        help="ask for Authorization: Bearer KEY (default: $QUANTGUARD_EMULATOR_API_KEY)")  # fmt: skip
    add("--served-model-name", help="default: the model's name or folder as given")


def options_from(arguments: argparse.Namespace) -> EmulatorOptions:
    """The parsed options as one frozen object."""
    values = {name: getattr(arguments, name) for name in EmulatorOptions.__slots__}
    values["faults"] = tuple(arguments.faults)
    return EmulatorOptions(**values)


def port(text: str) -> int:
    """A TCP port."""
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"expected a port between 1 and 65535, found {text!r}")
    return int(text)


def loopback(text: str) -> str:
    """A loopback address: the emulator has no business on a network."""
    if text not in LOOPBACK:
        raise argparse.ArgumentTypeError(
            f"the emulator listens on loopback only ({', '.join(LOOPBACK)}), found {text!r}"
        )
    return "127.0.0.1"


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text!r}")
    return int(text)


def quantization(text: str) -> str | dict[str, str] | None:
    """A scheme's name, or patterns -> formats as a JSON object."""
    if text.lower() in ("none", ""):
        return None
    if not text.startswith("{"):
        return text
    try:
        patterns = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from error
    if not all(isinstance(value, str) for value in patterns.values()):
        raise argparse.ArgumentTypeError("expected JSON that maps module patterns to the names of formats")
    return {str(key): value for key, value in patterns.items()}
