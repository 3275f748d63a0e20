"""Reads tensors of a model folder's safetensors files, one at a time, without torch.

The `safetensors` package cannot give BF16 or FP8 tensors to numpy, so the format's header (a length, a JSON
object, then raw little-endian data) is read here; each tensor is memory-mapped while it is read and released
after it. Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pytest_quantguard.emulator.formats.minifloat import E4M3, E5M2
from pytest_quantguard.emulator.formats.rounding import canonical_nans, round_bfloat16, widen_bfloat16
from pytest_quantguard.emulator.layout import EMBEDDING, LM_HEAD
from pytest_quantguard.emulator.model_config import ModelConfig, read_json
from pytest_quantguard.errors import ModelError

Float32 = npt.NDArray[np.float32]
ComputeType = Literal["bfloat16", "float32"]

INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
PLAIN_TYPES = ("BF16", "F16", "F32")
# Types without a numpy equivalent are read as their bit patterns.
_NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "BOOL": np.dtype("u1"),
    "I16": np.dtype("<i2"),
    "U16": np.dtype("<u2"),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies. dtype: safetensors' name for it; begin: bytes from the start of the file."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int


class TensorFolder:
    """The tensors of one model folder: a single file, or shards with an index."""

    def __init__(self, folder: Path) -> None:
        """Reads the headers only.

        Raises ModelError for a folder without safetensors, a missing shard, a truncated or damaged file, and
        an index that names a tensor which its file does not hold.
        """
        self.folder = folder
        self.entries: dict[str, TensorEntry] = {}
        if (folder / INDEX).is_file():
            self._read_shards()
        else:
            for path in _single_file(folder):
                self.entries.update(_read_header(path))

    def _read_shards(self) -> None:
        weight_map = read_json(self.folder, INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(
                f"{self.folder / INDEX}: expected an object 'weight_map' from tensor to file name"
            )
        shards = sorted({str(shard) for shard in weight_map.values()})
        missing = [shard for shard in shards if not (self.folder / shard).is_file()]
        if missing:
            raise ModelError(
                f"{self.folder}: {len(missing)} of {len(shards)} weight files named by {INDEX} are missing: "
                f"{', '.join(missing[:5])}; fetch the model again"
            )
        for shard in shards:
            self.entries.update(_read_header(self.folder / shard))
        for name, shard in weight_map.items():
            entry = self.entries.get(name)
            if entry is None or entry.path.name != Path(shard).name:
                raise ModelError(
                    f"{self.folder / INDEX}: tensor {name} should be in {shard}, but is not there"
                )

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def entry(self, name: str) -> TensorEntry:
        """Raises ModelError if there is no such tensor."""
        try:
            return self.entries[name]
        except KeyError:
            raise ModelError(f"{self.folder}: tensor {name} is missing from the safetensors files") from None

    def raw(self, name: str) -> npt.NDArray[Any]:
        """The stored elements, memory-mapped and read-only; BF16 and FP8 as unsigned bit patterns."""
        entry = self.entry(name)
        dtype = _NUMPY_TYPES[entry.dtype]
        if 0 in entry.shape:
            return np.empty(entry.shape, dtype)
        if not entry.shape:
            return np.fromfile(entry.path, dtype, count=1, offset=entry.begin).reshape(())
        return np.memmap(entry.path, dtype, mode="r", offset=entry.begin, shape=entry.shape)

    def float32(self, name: str) -> Float32:
        """The tensor's values as a new float32 array. Raises ModelError if it holds integers."""
        entry = self.entry(name)
        raw = self.raw(name)
        if entry.dtype == "BF16":
            return widen_bfloat16(raw)
        if entry.dtype == "F8_E4M3":
            return E4M3.decode(raw)
        if entry.dtype == "F8_E5M2":
            return E5M2.decode(raw)
        if entry.dtype in ("F32", "F16", "F64"):
            return canonical_nans(raw.astype(np.float32))
        raise ModelError(f"{entry.path}: tensor {name}: expected floating-point values, found {entry.dtype}")

    def positive_scalar(self, name: str) -> float:
        """A scale: one finite value above zero. Raises ModelError for anything else."""
        values = self.float32(name).reshape(-1)
        if values.size != 1 or not np.isfinite(values[0]) or values[0] <= 0:
            found = f"{values.size} values" if values.size != 1 else f"{values[0]:g}"
            raise ModelError(
                f"{self.entry(name).path}: tensor {name}: expected one positive finite scale, found {found}; "
                "the checkpoint cannot give meaningful answers (see `quantguard check-checkpoint`)"
            )
        return float(values[0])

    def plain(self, name: str, shape: tuple[int, ...], dtype: ComputeType) -> Float32:
        """An unquantized tensor, rounded to the compute type. Raises ModelError for another shape or type."""
        entry = self.entry(name)
        if entry.shape != shape:
            raise ModelError(
                f"{entry.path}: tensor {name} has shape {list(entry.shape)}, "
                f"config.json makes it {list(shape)}"
            )
        if entry.dtype not in PLAIN_TYPES:
            raise ModelError(
                f"{entry.path}: tensor {name}: expected {', '.join(PLAIN_TYPES)}, found {entry.dtype}: the "
                "folder's quantization config leaves this module unquantized"
            )
        values = self.float32(name)
        return values if dtype == "float32" or entry.dtype == "BF16" else round_bfloat16(values, out=values)


def read_plain_weight(
    files: TensorFolder, module: str, shape: tuple[int, int], config: ModelConfig, dtype: ComputeType
) -> Float32:
    """An unquantized linear layer's weight; a tied `lm_head` has the embedding's."""
    tied = module == LM_HEAD and config.tie_word_embeddings
    return files.plain(f"{EMBEDDING if tied else module}.weight", shape, dtype)


def _single_file(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ModelError(f"{folder}: expected a model folder, found no folder")
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files
    if files:
        raise ModelError(f"{folder}: {len(files)} safetensors files but no {INDEX}; fetch the model again")
    other = sorted(
        path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in folder.glob(pattern)
    )
    found = f"found {', '.join(other[:3])}" if other else "found none"
    raise ModelError(
        f"{folder}: expected model.safetensors or {INDEX}; {found}. Only safetensors can be read"
    )


def _read_header(path: Path) -> dict[str, TensorEntry]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
            raise ModelError(
                f"{path}: not a complete safetensors file: {size} bytes, header of {length} bytes announced; "
                "it is truncated or another kind of file"
            )
        text = file.read(length)
    try:
        header = json.loads(text)
        entries = {
            name: _entry(path, name, value, 8 + length) for name, value in header.items() if name[:2] != "__"
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{path}: the safetensors header is damaged: {error!r}") from error
    for entry, end in entries.values():
        if end > size:
            raise ModelError(
                f"{path}: truncated: tensor {entry.name} ends at byte {end} of {size}; fetch the model again"
            )
    return {name: entry for name, (entry, _) in entries.items()}


def _entry(path: Path, name: str, value: dict[str, Any], data_start: int) -> tuple[TensorEntry, int]:
    dtype = str(value["dtype"])
    if dtype not in _NUMPY_TYPES:
        raise ModelError(
            f"{path}: tensor {name} has the unknown type {dtype}; known: {', '.join(_NUMPY_TYPES)}"
        )
    shape = tuple(int(length) for length in value["shape"])
    begin, end = (int(offset) for offset in value["data_offsets"])
    expected = int(np.prod(shape, dtype=np.int64)) * _NUMPY_TYPES[dtype].itemsize
    if begin < 0 or end - begin != expected or min(shape, default=0) < 0:
        raise ModelError(
            f"{path}: tensor {name} {list(shape)} of {dtype} needs {expected} bytes, not {end - begin}"
        )
    return TensorEntry(name, path, dtype, shape, data_start + begin), data_start + end
