"""How much each part of a model suffers from quantization: the KL of quantizing one group of modules alone.

Runs on the emulator's engine in this process; needs the `[emulator]` extra. What a whole quantized server
does is the gate's business, not this module's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pytest_quantguard.config import AttachServer, GateConfig
from pytest_quantguard.emulator.checkpoint import Checkpoint, load_checkpoint
from pytest_quantguard.emulator.engine import Engine
from pytest_quantguard.emulator.formats import FORMATS, Format, PlainTensor, QuantizedTensor
from pytest_quantguard.emulator.hooks import Hooks, WeightRule
from pytest_quantguard.emulator.layout import LM_HEAD, fused_groups
from pytest_quantguard.emulator.linear import ActivationQuantizer
from pytest_quantguard.emulator.model import Model
from pytest_quantguard.emulator.models import resolve_model
from pytest_quantguard.emulator.quantization_config import read_quantization_config
from pytest_quantguard.emulator.quantize import KEPT_MODULES, check_format
from pytest_quantguard.emulator.sequences import SequenceRequest
from pytest_quantguard.emulator.tokenizer import load_tokenizer
from pytest_quantguard.errors import ConfigError, ModelError
from pytest_quantguard.logprobs.arrays import TopLogprobs
from pytest_quantguard.logprobs.divergence import Divergence, compare
from pytest_quantguard.logprobs.metrics import metric_intervals
from pytest_quantguard.prompts.suite import load_suite
from pytest_quantguard.results import Result
from pytest_quantguard.selftest.plan import spread_over_lengths

Grouping = Literal["parts", "kinds", "layers"]
"""parts: q/k/v, o, gate/up and down of every layer. kinds: these four over all layers. layers: whole ones."""

Progress = Callable[[str], None]
EVERYTHING = "everything"
UNQUANTIZED_BITS = 16.0


class GroupSensitivity(Result):
    """One group, quantized alone.

    kl_mean: nats per position, KL(unquantized || this group quantized); interval: 95 %, by prompt.
    bits_per_weight: of the group as quantized, scales included. bits_if_kept: of all linear layers but
    `lm_head`, were this group and every one before it in the ranking left unquantized and the rest quantized.
    """

    name: str
    modules: int
    weights: int
    bits_per_weight: float
    kl_mean: float
    interval: tuple[float, float] | None
    agreement: float
    bits_if_kept: float


class SensitivityResult(Result):
    """The ranking, most sensitive first. everything: all groups but `lm_head` at once."""

    schema_version: Literal[1] = 1
    name: str
    model: str
    format: str
    grouping: Grouping
    prompts: int
    positions: int
    groups: list[GroupSensitivity]
    everything: GroupSensitivity
    seconds: float


@dataclass(frozen=True, slots=True)
class SensitivityOptions:
    """format: None takes the candidate's scheme, or NVFP4. prompts: how many of the suite's; 0 for all.
    threads: that compute.
    """

    format: str | None = None
    grouping: Grouping = "parts"
    prompts: int = 8
    threads: int = 1


def measure_sensitivity(
    config: GateConfig, config_path: Path, options: SensitivityOptions, progress: Progress
) -> SensitivityResult:
    """Quantize each group of modules of the config's unquantized model alone, and rank by mean KL.

    Scored are the last `suite.score_tokens` tokens of each prompt's own text, in prefill. Raises ConfigError
    for an unknown format, or a config without an unquantized model; ModelError for one that cannot be read.
    """
    started = time.perf_counter()
    scheme = check_format(options.format or _scheme(config), "format")
    model, folder, dtype = _unquantized(config, progress)
    prompts = _prompts(config, config_path, folder, options.prompts)
    checkpoint = load_checkpoint(folder, dtype=dtype, progress=progress)
    groups = module_groups(checkpoint, options.grouping)
    with _bench(checkpoint, prompts, config, scheme, options.threads) as bench:
        found = [_measured(bench, EVERYTHING, _quantizable(groups), progress)]
        for number, (name, modules) in enumerate(groups.items(), start=1):
            left = (time.perf_counter() - started) / number * (len(groups) - number + 1)
            progress(f"{number} of {len(groups)}: {name}, about {left:.0f} s left")
            found.append(_measured(bench, name, modules, progress))
    everything, *alone = found
    return SensitivityResult(
        name=config.name,
        model=model,
        format=scheme.name,
        grouping=options.grouping,
        prompts=len(prompts),
        positions=sum(rows.positions for rows in bench.reference),
        groups=_ranked(alone, everything),
        everything=everything,
        seconds=round(time.perf_counter() - started, 1),
    )


def module_groups(checkpoint: Checkpoint, grouping: Grouping) -> dict[str, tuple[str, ...]]:
    """Group name -> its linear layers, in the order of the forward pass. `lm_head` is one of its own."""
    groups: dict[str, tuple[str, ...]] = {}
    for fused in fused_groups(checkpoint.config):
        name = _group_name(fused, grouping)
        groups[name] = (*groups.get(name, ()), *fused)
    return groups


def _group_name(fused: Sequence[str], grouping: Grouping) -> str:
    if fused == (LM_HEAD,):
        return LM_HEAD
    place, _, _ = fused[0].rpartition(".")
    layer, _, block = place.rpartition(".")
    kind = f"{block}.{'+'.join(name.rpartition('.')[2].removesuffix('_proj') for name in fused)}"
    return {"parts": f"{layer}.{kind}", "kinds": f"*.{kind}", "layers": layer}[grouping]


@dataclass(slots=True)
class _Bench:
    """A model in which groups are quantized in turn. reference: its rows without any, by prompt."""

    engine: Engine
    checkpoint: Checkpoint
    prompts: Sequence[tuple[int, ...]]
    score_tokens: int
    top_logprobs: int
    scheme: Format
    reference: list[TopLogprobs]

    def rows(self) -> list[TopLogprobs]:
        """The scored rows of every prompt as the model is now."""
        handles = self.engine.submit_batch(
            SequenceRequest(
                rid=f"sensitivity-{number}",
                input_ids=ids,
                max_new_tokens=0,
                return_logprob=True,
                logprob_start_len=len(ids) - min(self.score_tokens, len(ids) - 1) - 1,
                top_logprobs_num=self.top_logprobs,
            )
            for number, ids in enumerate(self.prompts)
        )
        found = []
        for handle in handles:
            rows = handle.result().prompt
            assert rows is not None
            scored = slice(rows.null_prefix, None)
            found.append(
                TopLogprobs(
                    token_ids=rows.top_ids[scored],
                    logprobs=rows.top_logprobs[scored],
                    chosen_ids=rows.token_ids[scored],
                    vocab_size=self.checkpoint.config.vocab_size,
                    chosen_logprobs=rows.logprobs[scored],
                )
            )
        return found

    def divergence(self, modules: Sequence[str]) -> Divergence:
        """KL and the like of the model with these modules quantized, against itself without."""
        self.engine.switch_hooks(quantizing_hooks(self.scheme, modules))
        self.engine.flush_cache()
        pairs = zip(self.reference, self.rows(), strict=True)
        return Divergence.concatenate([compare(ours, theirs) for ours, theirs in pairs])


@contextmanager
def _bench(
    checkpoint: Checkpoint,
    prompts: Sequence[tuple[int, ...]],
    config: GateConfig,
    scheme: Format,
    threads: int,
) -> Iterator[_Bench]:
    model = Model(checkpoint, threads=threads)
    engine = Engine(model, max_running_requests=max(48, len(prompts)), radix_cache=False)
    suite = config.suite
    width = min(suite.top_logprobs, checkpoint.config.vocab_size)
    bench = _Bench(engine, checkpoint, prompts, suite.score_tokens, width, scheme, [])
    try:
        bench.reference = bench.rows()
        yield bench
    finally:
        engine.stop()


def quantizing_hooks(scheme: Format, modules: Sequence[str]) -> Hooks:
    """Hooks that store these modules of an unquantized model in `scheme` and quantize their inputs so."""
    chosen = frozenset(modules)

    def store(group: Mapping[str, QuantizedTensor]) -> Mapping[str, QuantizedTensor]:
        names = [name for name in group if name in chosen]
        weights = []
        for name in names:
            tensor = group[name]
            assert isinstance(tensor, PlainTensor)
            if tensor.shape[1] % scheme.block_columns:
                raise ModelError(
                    f"{name} {list(tensor.shape)} cannot be stored as {scheme.name}: its input dimension "
                    f"must be a multiple of {scheme.block_columns}"
                )
            weights.append(tensor.values)
        return {**group, **dict(zip(names, scheme.quantize(weights), strict=True))}

    def activation(module: str, present: ActivationQuantizer | None) -> ActivationQuantizer | None:
        return scheme.activation if module in chosen else present

    return Hooks(weight=[WeightRule(chosen.__contains__, store)], activation=[activation])


def _measured(bench: _Bench, name: str, modules: Sequence[str], progress: Progress) -> GroupSensitivity:
    divergence = bench.divergence(modules)
    interval = metric_intervals(divergence, ["kl_mean"])["kl_mean"]
    checkpoint = bench.checkpoint
    sizes = {module: checkpoint.linears[module].weight.size for module in modules}
    weights = sum(sizes.values())
    bits = sum(checkpoint.bits_per_weight[module] * size for module, size in sizes.items()) / weights
    kl_mean = divergence.aggregate("kl_mean")
    progress(f"{name}: mean KL {kl_mean:.4g}")
    return GroupSensitivity(
        name=name,
        modules=len(modules),
        weights=weights,
        bits_per_weight=bits,
        kl_mean=kl_mean,
        interval=None if interval is None else (interval.low, interval.high),
        agreement=divergence.aggregate("agreement"),
        bits_if_kept=bits,
    )


def _ranked(groups: Sequence[GroupSensitivity], everything: GroupSensitivity) -> list[GroupSensitivity]:
    """Most sensitive first, with what keeping them from the top down costs in bits."""
    ranking = []
    stored = everything.bits_per_weight * everything.weights
    for group in sorted(groups, key=lambda group: -group.kl_mean):
        if group.name not in KEPT_MODULES:
            stored += (UNQUANTIZED_BITS - group.bits_per_weight) * group.weights
        ranking.append(group.model_copy(update={"bits_if_kept": stored / everything.weights}))
    return ranking


def _quantizable(groups: Mapping[str, tuple[str, ...]]) -> list[str]:
    return [module for modules in groups.values() for module in modules if module not in KEPT_MODULES]


def _scheme(config: GateConfig) -> str:
    candidate = config.candidate
    scheme = None if isinstance(candidate, AttachServer) else candidate.quantization
    return scheme if isinstance(scheme, str) and scheme in FORMATS and scheme != "bf16" else "nvfp4"


def _unquantized(config: GateConfig, progress: Progress) -> tuple[str, Path, Literal["bfloat16", "float32"]]:
    """The model without quantization as the config names it, its folder and compute type; the reference's
    before the candidate's.
    """
    for server in (config.reference, config.candidate):
        if server is None or isinstance(server, AttachServer):
            continue
        folder = resolve_model(server.model_path, progress=progress)
        if read_quantization_config(folder, []) is None:
            return server.model_path, folder, "float32" if server.dtype == "float32" else "bfloat16"
    raise ConfigError(
        f"{config.name}: neither `reference` nor `candidate` names the folder of an unquantized model, and "
        "only one can be quantized group by group. Add it as reference: {backend: emulator, model_path: ...}."
    )


def _prompts(config: GateConfig, config_path: Path, folder: Path, count: int) -> list[tuple[int, ...]]:
    suite = load_suite(config.suite, base_folder=config_path.parent)
    tokenizer = load_tokenizer(folder)
    if tokenizer is None and any(prompt.token_ids is None for prompt in suite):
        raise ModelError(f"{folder} has no tokenizer.json, and the suite's prompts are texts")
    found: list[tuple[int, ...]] = []
    for prompt in suite:
        ids = prompt.token_ids
        if ids is None and tokenizer is not None and prompt.text is not None:
            ids = tuple(tokenizer.encode(prompt.text))
        if ids is not None and len(ids) > 1:
            found.append(ids)
    if not found:
        raise ConfigError(
            f"{config.name}: no prompt of the suite has two tokens or more, so none can be scored"
        )
    if not 0 < count < len(found):
        return found
    return [found[index] for index in spread_over_lengths([len(ids) for ids in found], count)]
