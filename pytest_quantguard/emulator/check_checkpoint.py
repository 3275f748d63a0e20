"""Reads a quantized checkpoint without running it and reports what will go wrong in a server.

Only files are read, one tensor at a time. Whether the model answers well is another question: that takes a
gate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pytest_quantguard.emulator.formats.minifloat import E4M3
from pytest_quantguard.emulator.layout import EMBEDDING, LM_HEAD, fused_groups, linear_shapes, tensor_shapes
from pytest_quantguard.emulator.model_config import ModelConfig
from pytest_quantguard.emulator.published import PublishedWeights, TensorNames, kv_scale_names, tensor_names
from pytest_quantguard.emulator.quantization_config import (
    QuantizationConfig,
    StoredScheme,
    read_quantization_config,
)
from pytest_quantguard.emulator.signal_to_noise import TensorNoise, compare_with_reference
from pytest_quantguard.emulator.tensor_files import PLAIN_TYPES, TensorFolder
from pytest_quantguard.errors import ModelError

SCHEMA_VERSION = 1
_SATURATED_CODE = 0x7E
_NAN_CODE = 0x7F
_SATURATED_SHARE = 0.1
_IMPLAUSIBLE_AMAX = 1e4
_ENOUGH_SCALES = 16


@dataclass(frozen=True)
class Finding:
    """One defect. severity: an error makes answers wrong or the load fail; a warning deserves a look.

    kind: a stable word for machines. tensor: the tensor or module that is concerned.
    """

    severity: Literal["error", "warning"]
    kind: str
    tensor: str
    message: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.tensor}: {self.message} [{self.kind}]"


@dataclass(frozen=True)
class CheckpointReport:
    """formats: number of linear layers by scheme. noise: by tensor, where a reference was given."""

    folder: Path
    method: str
    formats: Mapping[str, int]
    findings: tuple[Finding, ...]
    noise: tuple[TensorNoise, ...] = ()

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that make the checkpoint unfit."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def passed(self) -> bool:
        """No errors; warnings may be there."""
        return not self.errors

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file; a signal-to-noise ratio of null means that the tensors are equal."""
        return {
            "schema_version": SCHEMA_VERSION,
            "folder": str(self.folder),
            "method": self.method,
            "formats": dict(self.formats),
            "passed": self.passed,
            "findings": [
                {"severity": f.severity, "kind": f.kind, "tensor": f.tensor, "message": f.message}
                for f in self.findings
            ],
            "noise": [
                {
                    "tensor": item.tensor,
                    "format": item.format,
                    "signal_to_noise_db": None if np.isinf(item.decibels) else round(item.decibels, 3),
                }
                for item in self.noise
            ],
        }


def check_checkpoint(
    folder: Path, reference: Path | None = None, progress: Callable[[str], None] | None = None
) -> CheckpointReport:
    """Check the quantized checkpoint in `folder`, against the unquantized one in `reference` if given.

    Raises ModelError where there is nothing to check: no folder, damaged files, an unsupported architecture
    or quantization, no quantization at all, or a reference of another shape.
    """
    config = ModelConfig.from_folder(folder)
    files = TensorFolder(folder)
    quantization = read_quantization_config(folder, list(linear_shapes(config)))
    if quantization is None:
        raise ModelError(f"{folder}: expected a quantized checkpoint, found no quantization config")
    checker = _Checker(files, config, quantization, progress or (lambda _: None))
    checker.run()
    noise: tuple[TensorNoise, ...] = ()
    if reference is not None:
        noise = checker.compare(reference)
    formats: dict[str, int] = {}
    for scheme in quantization.schemes.values():
        name = "bf16" if scheme is None else scheme.name
        formats[name] = formats.get(name, 0) + 1
    return CheckpointReport(folder, quantization.method, formats, tuple(checker.findings), noise)


@dataclass
class _Checker:
    """Collects findings; modules with a structural defect are not looked at any further."""

    files: TensorFolder
    config: ModelConfig
    quantization: QuantizationConfig
    progress: Callable[[str], None]
    findings: list[Finding] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)

    def run(self) -> None:
        shapes = linear_shapes(self.config)
        for name, shape in tensor_shapes(self.config).items():
            self._plain(f"{name}.weight", shape)
        for module, shape in shapes.items():
            self.progress(f"checking {module}")
            scheme = self.quantization.schemes[module]
            if scheme is None:
                self._unquantized_module(module, shape)
            elif self._structure(module, scheme, shape):
                self._scales(module, scheme)
        for group in fused_groups(self.config):
            self._fused(group)
        self._kv_scales()

    def compare(self, reference: Path) -> tuple[TensorNoise, ...]:
        weights = PublishedWeights(self.files, self.config, "float32", self.quantization)
        modules = [module for module in linear_shapes(self.config) if module not in self.broken]
        noise, suspects = compare_with_reference(weights, modules, reference, self.progress)
        for item, why in suspects:
            self._error("noisy-tensor", item.tensor, why)
        return noise

    def _error(self, kind: str, tensor: str, message: str) -> None:
        self.findings.append(Finding("error", kind, tensor, message))

    def _warn(self, kind: str, tensor: str, message: str) -> None:
        self.findings.append(Finding("warning", kind, tensor, message))

    # Structure: is what the config says there, in the right type and shape?

    def _plain(self, name: str, shape: tuple[int, ...]) -> bool:
        if name not in self.files:
            self._error("missing-tensor", name, "is missing")
            return False
        entry = self.files.entry(name)
        if entry.dtype not in PLAIN_TYPES:
            what = "the embedding is quantized" if name.startswith(EMBEDDING) else "is quantized"
            self._error(
                "excluded-but-quantized", name, f"{what} ({entry.dtype}) although the config excludes it"
            )
            return False
        if entry.shape != shape:
            self._error(
                "wrong-shape", name, f"has shape {list(entry.shape)}, config.json makes it {list(shape)}"
            )
            return False
        values = self.files.float32(name)
        if not np.isfinite(values).all():
            bad = int((~np.isfinite(values)).sum())
            self._error("non-finite-weights", name, f"{bad} of {values.size} values are NaN or infinite")
        elif not values.any():
            self._error("zero-weights", name, "all values are zero")
        return True

    def _unquantized_module(self, module: str, shape: tuple[int, int]) -> None:
        if module == LM_HEAD and self.config.tie_word_embeddings and f"{LM_HEAD}.weight" not in self.files:
            return
        packed = f"{module}.weight_packed" in self.files
        if packed and f"{module}.weight" not in self.files:
            what = "the output layer is quantized" if module == LM_HEAD else "is quantized"
            self._error(
                "excluded-but-quantized", f"{module}.weight_packed", f"{what} although the config excludes it"
            )
            self.broken.add(module)
        elif not self._plain(f"{module}.weight", shape):
            self.broken.add(module)
        elif any(
            f"{module}.{part}" in self.files
            for part in ("weight_scale", "weight_scale_2", "weight_scale_inv")
        ):
            self._warn("unused-scale", module, "has a weight scale, but is neither quantized nor meant to be")

    def _structure(self, module: str, scheme: StoredScheme, shape: tuple[int, int]) -> bool:
        names = tensor_names(module, scheme, self.quantization.method)
        plain = self.files.entries.get(f"{module}.weight")
        if plain is not None and plain.dtype in PLAIN_TYPES:
            self._error(
                "listed-but-unquantized",
                plain.name,
                f"is stored as {plain.dtype}, the config makes it {scheme.name}",
            )
            self.broken.add(module)
            return False
        missing = [name for name in _parts(names) if name not in self.files]
        for name in missing:
            self._error("missing-scale" if name != names.weight else "missing-tensor", name, "is missing")
        wrong = [] if missing else list(self._wrong_shapes(names, scheme, shape))
        for name, message in wrong:
            self._error("wrong-shape", name, message)
        alignment = 128 if scheme.granularity == "block" else 16
        if any(length % alignment for length in shape):
            self._warn(
                "unaligned-shape",
                module,
                f"{list(shape)} is not a multiple of {alignment}, which kernels may refuse",
            )
        if missing or wrong:
            self.broken.add(module)
        return not missing and not wrong

    def _wrong_shapes(
        self, names: TensorNames, scheme: StoredScheme, shape: tuple[int, int]
    ) -> Iterator[tuple[str, str]]:
        rows, columns = shape
        expected: dict[str, tuple[str, tuple[int, ...]]] = {names.weight: ("F8_E4M3", shape)}
        if scheme.weights == "nvfp4":
            expected[names.weight] = ("U8", (rows, columns // 2))
            expected[names.weight_scale] = ("F8_E4M3", (rows, columns // 16))
        for name, (dtype, wanted) in expected.items():
            entry = self.files.entry(name)
            if (entry.dtype, entry.shape) != (dtype, wanted):
                yield (
                    name,
                    f"is {entry.dtype} {list(entry.shape)}, {scheme.name} makes it {dtype} {list(wanted)}",
                )
        scalars = [name for name in (names.global_scale, names.input_scale) if name is not None]
        for name in scalars:
            if int(np.prod(self.files.entry(name).shape)) != 1:
                yield name, f"has {int(np.prod(self.files.entry(name).shape))} values, expected one"
        if scheme.weights == "fp8":
            count = int(np.prod(self.files.entry(names.weight_scale).shape))
            wanted_count = {"tensor": 1, "channel": rows, "block": -(-rows // 128) * -(-columns // 128)}
            if count != wanted_count[scheme.granularity]:
                yield names.weight_scale, f"has {count} values, expected {wanted_count[scheme.granularity]}"

    # Values: can the scales be right?

    def _scales(self, module: str, scheme: StoredScheme) -> None:
        names = tensor_names(module, scheme, self.quantization.method)
        scales = [name for name in (names.global_scale, names.input_scale) if name is not None]
        if scheme.weights == "nvfp4":
            self._block_scales(names)
        else:
            scales.append(names.weight_scale)
            codes = self.files.raw(names.weight)
            if ((codes & _NAN_CODE) == _NAN_CODE).any():
                self._error("non-finite-weights", names.weight, "holds NaN")
            elif not (codes & _NAN_CODE).any():
                self._error("zero-weights", names.weight, "all values are zero")
        usable = [self._float_scales(name) for name in scales]
        if not all(usable):
            self.broken.add(module)
        elif names.global_scale is not None:
            self._plausible(names)

    def _block_scales(self, names: TensorNames) -> None:
        codes = np.array(self.files.raw(names.weight_scale))
        name = names.weight_scale
        if (codes & _NAN_CODE == _NAN_CODE).any():
            self._error(
                "non-finite-scale", name, f"{int((codes & _NAN_CODE == _NAN_CODE).sum())} scales are NaN"
            )
        if (codes & 0x80).any():
            self._error("negative-scale", name, f"{int((codes & 0x80 != 0).sum())} scales are negative")
        packed = np.array(self.files.raw(names.weight))
        # Code 8 is minus zero: a block of zeros needs no scale, and some exporters give it one of zero.
        used = ((packed & 0x77) != 0).reshape(*codes.shape, 8).any(axis=-1)
        zeros = int(((codes & _NAN_CODE == 0) & used).sum())
        if zeros:
            self._error(
                "zero-scale", name, f"{zeros} of {codes.size} scales are zero over weights that are not"
            )
        if not used.any():
            self._error("zero-weights", names.weight, "all values are zero")
        elif codes.size >= _ENOUGH_SCALES and (codes == codes.flat[0]).all():
            value = float(E4M3.decode(codes[:1, :1])[0, 0])
            self._error("constant-scale", name, f"all {codes.size} scales are {value:g}")
        else:
            saturated = float((codes == _SATURATED_CODE).mean())
            if saturated > _SATURATED_SHARE:
                self._error(
                    "saturated-scale",
                    name,
                    f"{saturated:.0%} of the scales are at E4M3's largest: the global scale is too small",
                )

    def _float_scales(self, name: str) -> bool:
        """Whether the scales can be divided by at all."""
        values = self.files.float32(name)
        if not np.isfinite(values).all():
            self._error("non-finite-scale", name, _count(~np.isfinite(values), "NaN or infinite"))
        elif (values == 0).any():
            self._error("zero-scale", name, _count(values == 0, "zero"))
        elif (values < 0).any():
            self._error("negative-scale", name, _count(values < 0, "negative"))
        else:
            if values.size >= _ENOUGH_SCALES and (values == values.flat[0]).all():
                self._error("constant-scale", name, f"all {values.size} scales are {values.flat[0]:g}")
            return True
        return False

    def _plausible(self, names: TensorNames) -> None:
        """The largest weight that the global scale allows; an inverted scale allows absurd ones."""
        assert names.global_scale is not None
        stored = float(self.files.float32(names.global_scale).reshape(-1)[0])
        scale = 1 / stored if names.inverse and stored else stored
        if scale * 2688 > _IMPLAUSIBLE_AMAX and np.isfinite(scale):
            self._error(
                "implausible-scale",
                names.global_scale,
                f"{stored:g} allows weights of up to {scale * 2688:.3g}; perhaps it should be the inverse",
            )

    # Agreement between modules

    def _fused(self, group: Sequence[str]) -> None:
        schemes = [self.quantization.schemes[module] for module in group]
        members = [module for module in group if module not in self.broken]
        if len(group) < 2 or len(members) < len(group):
            return
        if len({scheme.name if scheme else "bf16" for scheme in schemes}) > 1:
            kinds = ", ".join(
                f"{m.rpartition('.')[2]} {s.name if s else 'bf16'}"
                for m, s in zip(group, schemes, strict=True)
            )
            self._warn("fused-formats-differ", group[0], f"is fused with modules in other formats: {kinds}")
            return
        scheme = schemes[0]
        if scheme is None:
            return
        names = [tensor_names(module, scheme, self.quantization.method) for module in group]
        if scheme.weights == "nvfp4":
            self._equal(
                [part.global_scale for part in names],
                "error",
                "kernels use the largest for all of them, so the others' weights come out too large",
            )
        elif scheme.granularity == "tensor":
            self._equal(
                [part.weight_scale for part in names], "warning", "servers requantize the smaller ones"
            )
        self._equal(
            [part.input_scale for part in names], "warning", "servers use the largest for all of them"
        )

    def _equal(
        self, names: Sequence[str | None], severity: Literal["error", "warning"], consequence: str
    ) -> None:
        present = [name for name in names if name is not None]
        values = [float(self.files.float32(name).reshape(-1)[0]) for name in present]
        if len(set(values)) > 1 and all(np.isfinite(values)):
            parts = ", ".join(f"{n.rsplit('.', 2)[1]} {v:.6g}" for n, v in zip(present, values, strict=True))
            finding = f"differs within a fused group ({parts}); {consequence}"
            self.findings.append(Finding(severity, "fused-scales-differ", present[0], finding))

    def _kv_scales(self) -> None:
        if self.quantization.kv_cache == "bf16":
            return
        values: list[float] = []
        for layer in range(self.config.num_layers):
            for name in kv_scale_names(self.files, layer, self.quantization.method):
                if name not in self.files:
                    self._error(
                        "missing-kv-scale", name, "is missing although the config quantizes the cache"
                    )
                    continue
                self._float_scales(name)
                values.extend(self.files.float32(name).reshape(-1).tolist())
        if values and set(values) == {1.0}:
            self._warn(
                "unit-kv-scales",
                kv_scale_names(self.files, 0, self.quantization.method)[0],
                f"all {len(values)} key/value scales are 1.0: uncalibrated; keys above 448 are clipped",
            )


def _parts(names: TensorNames) -> list[str]:
    parts = (names.weight, names.weight_scale, names.global_scale, names.input_scale)
    return [name for name in parts if name is not None]


def _count(mask: np.ndarray[Any, Any], what: str) -> str:
    return f"is {what}" if mask.size == 1 else f"{int(mask.sum())} of {mask.size} scales are {what}"
