"""Bytes <-> cells: an exact, compact coding of top log-probabilities.

Nothing is lost: ids, their order, and every bit of every float32 come back. It is small because

- a server that computes logits in BF16 answers `(logit - max) - log(sum)` in float32, so a row's log-probabilities
  are its first one plus multiples of a power of two, rounded once. The multiples are small integers; float32
  logits fall back to a finer grid with the rounding error in units in the last place, and stay exact;
- token ids are renamed by how often they occur in the recording;
- cells (phase, batch size) of one server nearly repeat each other: an identical cell is stored once, a similar
  one as the change of each token's rank.

The layout is `MAGIC`, a little-endian uint32 length, a JSON header of that length, then xz streams of byte planes.
Files and digests are the store's business.
"""

from __future__ import annotations

import hashlib
import itertools
import lzma
import struct
from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pytest_quantguard.baseline.recording import Cell, CellKey, PromptRecord
from pytest_quantguard.config import Phase
from pytest_quantguard.errors import BaselineError
from pytest_quantguard.logprobs.arrays import Float32, Int32, TopLogprobs

MAGIC = b"QGLP\x01\r\n\x00"
FINEST_GRID = 16
"""Rows that do not lie on multiples of 2**-FINEST_GRID are taken as float32 logits."""
FLOAT_GRID = 23
MAX_GRID_ERROR = 2
"""Units in the last place by which a row on a grid may miss it (servers differ in where they round)."""
MAX_HEADER_BYTES = 16 << 20
DECODER_MEMORY = 256 << 20
CHOSEN_IN_TOP, CHOSEN_UNKNOWN, CHOSEN_EXPLICIT = 0, 1, 2

Count = Annotated[int, Field(ge=0, le=1 << 40)]
UInt32 = npt.NDArray[np.uint32]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Stream(_Part):
    compressed: Count
    raw: Count


class _CellHeader(_Part):
    phase: Phase
    batch_size: int = Field(ge=1)
    batches: list[list[int]]
    same_as: int | None = Field(default=None, ge=0)
    based_on: int | None = Field(default=None, ge=0)
    streams: list[_Stream] = []


class _Header(_Part):
    vocab_size: int = Field(ge=1, le=1 << 31)
    width: int = Field(ge=1, le=1 << 20)
    spans: list[int]
    dictionary: list[_Stream]
    dictionary_groups: list[int]
    cells: list[_CellHeader]


class _Rows:
    """A cell's rows of all prompts, one under the other."""

    def __init__(
        self, token_ids: Int32, logprobs: Float32, chosen_ids: Int32, chosen_logprobs: Float32
    ) -> None:
        self.token_ids = token_ids  # int32 [N, K]
        self.logprobs = logprobs  # float32 [N, K]
        self.chosen_ids = chosen_ids  # int32 [N]
        self.chosen_logprobs = chosen_logprobs  # float32 [N]

    @classmethod
    def of(cls, cell: Cell) -> _Rows:
        return cls(
            np.concatenate([rows.token_ids for rows in cell.rows]),
            np.concatenate([rows.logprobs for rows in cell.rows]),
            np.concatenate([rows.chosen_ids for rows in cell.rows]),
            np.concatenate([rows.chosen_logprobs for rows in cell.rows]),
        )

    def split(self, spans: Sequence[int], vocab_size: int) -> tuple[TopLogprobs, ...]:
        """One TopLogprobs per prompt."""
        edges = np.cumsum([0, *spans])
        return tuple(
            TopLogprobs(
                self.token_ids[start:end],
                self.logprobs[start:end],
                self.chosen_ids[start:end],
                vocab_size,
                self.chosen_logprobs[start:end],
            )
            for start, end in itertools.pairwise(edges)
        )

    def digest(self) -> str:
        digest = hashlib.sha256()
        for array in (self.token_ids, self.logprobs, self.chosen_logprobs):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def encode_cells(cells: Mapping[CellKey, Cell], prompts: Sequence[PromptRecord]) -> bytes:
    """Code all cells of a recording; `decode_cells` with the same prompts gives them back bit for bit.

    The chosen ids of a row are those of the prompt's span and are not stored again. Raises ValueError where a cell
    breaks the form that `Cell` and `PromptRecord` promise: that is a fault of the program, not of its user.
    """
    spans = [len(prompt.span_ids) for prompt in prompts]
    width, vocab_size = _check_form(cells, prompts, spans)
    ordered = [(cell, _Rows.of(cell)) for cell in cells.values()]
    first_with: dict[str, int] = {}
    same_as = [first_with.setdefault(rows.digest(), index) for index, (_, rows) in enumerate(ordered)]
    dictionary, groups = _frequency_order(
        np.concatenate(
            [rows.token_ids.ravel() for index, (_, rows) in enumerate(ordered) if same_as[index] == index]
        )
    )
    names = np.zeros(vocab_size, dtype=np.uint32)
    names[dictionary] = np.arange(len(dictionary), dtype=np.uint32)

    payload: list[bytes] = []
    dictionary_streams = _write_planes(payload, _dictionary_steps(dictionary, groups))
    headers = []
    for index, (cell, rows) in enumerate(ordered):
        key = {"phase": cell.key.phase, "batch_size": cell.key.batch_size}
        batches = [list(batch) for batch in cell.batches]
        if same_as[index] != index:
            headers.append(_CellHeader(**key, batches=batches, same_as=same_as[index]))
            continue
        base = ordered[0][1] if index else None
        streams = _encode_rows(payload, rows, names, base, vocab_size)
        headers.append(_CellHeader(**key, batches=batches, based_on=0 if index else None, streams=streams))
    header = _Header(
        vocab_size=vocab_size,
        width=width,
        spans=spans,
        dictionary=dictionary_streams,
        dictionary_groups=groups,
        cells=headers,
    ).model_dump_json(exclude_defaults=True)
    return b"".join([MAGIC, struct.pack("<I", len(header)), header.encode(), *payload])


def decode_cells(payload: bytes, prompts: Sequence[PromptRecord]) -> dict[CellKey, Cell]:
    """Inverse of `encode_cells`. Raises BaselineError for anything that `encode_cells` did not write.

    No more memory is used than the prompts and the stated number of log-probabilities per position ask for.
    """
    try:
        return _decode(payload, prompts)
    except (_FormError, lzma.LZMAError, ValidationError, struct.error, orjson.JSONDecodeError) as error:
        raise BaselineError(f"The log-probability data is not in this package's format: {error}") from error


class _FormError(Exception):
    """The bytes contradict themselves or the prompts."""


def _decode(payload: bytes, prompts: Sequence[PromptRecord]) -> dict[CellKey, Cell]:
    view = memoryview(payload)
    if view[: len(MAGIC)] != MAGIC:
        raise _FormError("it does not begin with this format's mark")
    (length,) = struct.unpack_from("<I", view, len(MAGIC))
    start = len(MAGIC) + 4
    if length > MAX_HEADER_BYTES or start + length > len(view):
        raise _FormError("the data is shorter than its header says")
    header = _Header.model_validate_json(bytes(view[start : start + length]))
    spans = [len(prompt.span_ids) for prompt in prompts]
    if header.spans != spans:
        raise _FormError(
            f"it covers {len(header.spans)} prompts with other scored spans than the {len(spans)} given"
        )
    chosen_ids = np.concatenate([prompt.span_ids for prompt in prompts]).astype(np.int32)
    streams = _StreamReader(view[start + length :])
    streams.enter(header.dictionary)
    steps = streams.planes(1, header.vocab_size)
    streams.leave()
    dictionary = _read_dictionary(steps, header.dictionary_groups, header.vocab_size)
    decoded: list[_Rows] = []
    cells: dict[CellKey, Cell] = {}
    for cell_header in header.cells:
        rows = _decode_cell(streams, cell_header, decoded, chosen_ids, header.width, dictionary)
        decoded.append(rows)
        key = CellKey(cell_header.phase, cell_header.batch_size)
        if key in cells:
            raise _FormError(f"cell {key} occurs twice")
        if not _holds_each_once(cell_header.batches, len(prompts)):
            raise _FormError(f"cell {key}: the batches do not hold each of the {len(prompts)} prompts once")
        batches = tuple(tuple(batch) for batch in cell_header.batches)
        cells[key] = Cell(key, batches, rows.split(spans, header.vocab_size))
    if not cells or not streams.exhausted:
        raise _FormError("there are no cells, or bytes are left over")
    return cells


def _decode_cell(
    streams: _StreamReader,
    header: _CellHeader,
    decoded: list[_Rows],
    chosen_ids: Int32,
    width: int,
    dictionary: Int32,
) -> _Rows:
    source = header.based_on if header.same_as is None else header.same_as
    if source is not None and source >= len(decoded):
        raise _FormError("a cell refers to one that comes after it")
    if header.same_as is not None:
        return decoded[header.same_as]
    streams.enter(header.streams)
    base = None if header.based_on is None else decoded[header.based_on]
    rows = _decode_rows(streams, chosen_ids, width, dictionary, base)
    streams.leave()
    return rows


def _check_form(
    cells: Mapping[CellKey, Cell], prompts: Sequence[PromptRecord], spans: list[int]
) -> tuple[int, int]:
    """(K, vocabulary size) that all rows share."""
    if not cells or not prompts or 0 in spans:
        raise ValueError("a recording needs at least one cell, one prompt and one scored position per prompt")
    shapes = {(rows.width, rows.vocab_size) for cell in cells.values() for rows in cell.rows}
    if len(shapes) != 1:
        raise ValueError(f"all rows must have one K and one vocabulary size, not {sorted(shapes)}")
    width, vocab_size = shapes.pop()
    for key, cell in cells.items():
        if key != cell.key or len(cell.rows) != len(prompts):
            raise ValueError(
                f"cell {key} holds {len(cell.rows)} prompts of {cell.key}, expected {len(prompts)}"
            )
        if not _holds_each_once(cell.batches, len(prompts)):
            raise ValueError(f"cell {key}: the batches do not hold each of the {len(prompts)} prompts once")
        for prompt, rows in zip(prompts, cell.rows, strict=True):
            if not np.array_equal(rows.chosen_ids, prompt.span_ids):
                raise ValueError(f"cell {key}, prompt {prompt.id}: chosen_ids are not the prompt's span")
            if rows.token_ids.min() < 0 or rows.token_ids.max() >= vocab_size:
                raise ValueError(f"cell {key}, prompt {prompt.id}: a token id is outside 0..{vocab_size - 1}")
            if not np.isfinite(rows.logprobs).all():
                raise ValueError(f"cell {key}, prompt {prompt.id}: non-finite log-probabilities")
    return width, vocab_size


def _holds_each_once(batches: Sequence[Sequence[int]], prompts: int) -> bool:
    return sorted(index for batch in batches for index in batch) == list(range(prompts))


# --- token ids -------------------------------------------------------------------------------------------------


def _frequency_order(ids: Int32) -> tuple[UInt32, list[int]]:
    """Distinct ids, frequent ones first, in groups of similar frequency that ascend by id; and the group sizes."""
    distinct, counts = np.unique(ids, return_counts=True)
    magnitude = np.floor(np.log2(counts)).astype(np.int64)
    order = np.lexsort((distinct, -magnitude))
    _, sizes = np.unique(-magnitude, return_counts=True)
    return distinct[order].astype(np.uint32), [int(size) for size in sizes]


def _dictionary_steps(dictionary: UInt32, groups: list[int]) -> UInt32:
    """Differences of consecutive ids within each group; a group's first id counts from 0."""
    starts = np.concatenate([[0], np.cumsum(groups)[:-1]]).astype(np.int64)
    steps = np.diff(dictionary.astype(np.int64), prepend=0)
    steps[starts] = dictionary[starts]
    return steps.astype(np.uint32)


def _read_dictionary(steps: UInt32, groups: list[int], vocab_size: int) -> Int32:
    if sum(groups) != len(steps) or any(size < 1 for size in groups):
        raise _FormError("the token dictionary's groups do not add up")
    ids = np.concatenate(
        [np.cumsum(part, dtype=np.uint64) for part in np.split(steps, np.cumsum(groups)[:-1])] or [steps]
    )
    if len(ids) == 0 or ids.max() >= vocab_size:
        raise _FormError("the token dictionary is empty or holds a token outside the vocabulary")
    return ids.astype(np.int32)


def _ranks_in(base: Int32, ids: Int32, vocab_size: int) -> npt.NDArray[np.int64]:
    """int64 [N, K]: the rank that each id has in the same row of `base`, -1 where it is not there."""
    rows, width = ids.shape
    offset = np.arange(rows, dtype=np.int64)[:, None] * vocab_size
    keys = (base + offset).ravel()
    order = np.argsort(keys, kind="stable")
    wanted = (ids + offset).ravel()
    place = np.minimum(np.searchsorted(keys, wanted, sorter=order), len(keys) - 1)
    found = keys[order[place]] == wanted
    return np.where(found, order[place] % width, -1).reshape(rows, width)


def _rank_changes(ranks: npt.NDArray[np.int64]) -> UInt32:
    """Symbols: 0 for an id that the base row lacks, else 1 + the zigzag-coded change of rank."""
    change = ranks - np.arange(ranks.shape[1])
    zigzag = np.where(change >= 0, 2 * change, -2 * change - 1)
    return np.where(ranks < 0, 0, zigzag + 1).astype(np.uint32)


# --- log-probabilities -----------------------------------------------------------------------------------------


def _ordered(values: Float32) -> Int32:
    """int32 that order like the floats; neighbours differ by 1."""
    bits = values.view(np.int32)
    return bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))


def _from_ordered(ordered: Int32) -> Float32:
    return (ordered ^ ((ordered >> 31) & np.int32(0x7FFFFFFF))).view(np.float32)


def _predict(first: Float32, levels: Int32, grids: npt.NDArray[np.uint8]) -> Int32:
    """The float32 nearest to first + level * 2**-grid, in `_ordered` form."""
    exact = first.astype(np.float64)[:, None] + np.ldexp(
        levels.astype(np.float64), -grids.astype(np.int32)[:, None]
    )
    return _ordered(exact.astype(np.float32))


def _to_levels(logprobs: Float32) -> tuple[npt.NDArray[np.uint8], Int32, Int32]:
    """(grid exponent uint8 [N], levels int32 [N, K], residuals int32 [N, K] in units in the last place)."""
    first = logprobs[:, 0]
    drop = logprobs.astype(np.float64) - first.astype(np.float64)[:, None]
    target = _ordered(logprobs)
    grids = np.full(len(logprobs), FLOAT_GRID, dtype=np.uint8)
    levels = np.zeros(logprobs.shape, dtype=np.int32)
    open_rows = np.arange(len(logprobs))
    for grid in (*range(FINEST_GRID + 1), FLOAT_GRID):
        scaled = np.clip(np.rint(np.ldexp(drop[open_rows], grid)), -(2**31), 2**31 - 1).astype(np.int32)
        predicted = _predict(first[open_rows], scaled, np.full(len(open_rows), grid, dtype=np.uint8))
        miss = np.abs(target[open_rows].astype(np.int64) - predicted).max(axis=1)
        fits = (miss <= MAX_GRID_ERROR) | (grid == FLOAT_GRID)
        grids[open_rows[fits]] = grid
        levels[open_rows[fits]] = scaled[fits]
        open_rows = open_rows[~fits]
    residuals = (target.view(np.uint32) - _predict(first, levels, grids).view(np.uint32)).view(np.int32)
    return grids, levels, residuals


# --- rows ------------------------------------------------------------------------------------------------------


def _encode_rows(
    payload: list[bytes], rows: _Rows, names: UInt32, base: _Rows | None, vocab_size: int
) -> list[_Stream]:
    """Append a cell's streams to `payload`, in the order in which `_decode_rows` reads them."""
    if base is None:
        symbols, escapes = names[rows.token_ids], np.zeros(0, dtype=np.uint32)
    else:
        ranks = _ranks_in(base.token_ids, rows.token_ids, vocab_size)
        symbols, escapes = _rank_changes(ranks), names[rows.token_ids[ranks < 0]]
    grids, levels, residuals = _to_levels(rows.logprobs)
    steps = (levels[:, :-1].view(np.uint32) - levels[:, 1:].view(np.uint32)).astype(np.uint32)
    states, explicit = _chosen_states(rows)
    streams = _write_planes(payload, symbols) + _write_planes(payload, escapes)
    streams += _write_planes(payload, rows.logprobs[:, 0].copy().view(np.uint32))
    streams += [_write_stream(payload, grids.tobytes())]
    streams += _write_planes(payload, steps) + _write_planes(payload, _zigzag(residuals))
    streams += [_write_stream(payload, states.tobytes()), _write_stream(payload, explicit.tobytes())]
    return streams


def _decode_rows(
    streams: _StreamReader, chosen_ids: Int32, width: int, dictionary: Int32, base: _Rows | None
) -> _Rows:
    count = len(chosen_ids)
    total = count * width
    symbols = streams.planes(total, total).reshape(count, width)
    escapes = _look_up(dictionary, streams.planes(0, 0 if base is None else total))
    if base is None:
        token_ids = _look_up(dictionary, symbols)
    else:
        token_ids = _apply_rank_changes(base.token_ids, symbols, escapes)
    first = streams.planes(count, count).view(np.float32)
    grids = np.frombuffer(streams.read(count, count), dtype=np.uint8)
    steps = streams.planes(total - count, total - count).reshape(count, width - 1)
    residuals = _unzigzag(streams.planes(total, total)).reshape(count, width)
    levels = np.zeros((count, width), dtype=np.uint32)
    np.subtract(np.uint32(0), np.cumsum(steps, axis=1, dtype=np.uint32), out=levels[:, 1:])
    predicted = _predict(first, levels.view(np.int32), grids)
    logprobs = _from_ordered((predicted.view(np.uint32) + residuals.view(np.uint32)).view(np.int32))
    if not np.isfinite(logprobs).all():
        raise _FormError("non-finite log-probabilities")
    chosen = _chosen_values(
        token_ids, logprobs, chosen_ids, streams.read(count, count), streams.read(0, 4 * count)
    )
    return _Rows(token_ids, logprobs, chosen_ids, chosen)


def _look_up(dictionary: Int32, symbols: UInt32) -> Int32:
    if symbols.size and int(symbols.max()) >= len(dictionary):
        raise _FormError("a token's name is outside the dictionary")
    return dictionary[symbols]


def _apply_rank_changes(base: Int32, symbols: UInt32, escapes: Int32) -> Int32:
    width = base.shape[1]
    missing = symbols == 0
    if int(missing.sum()) != len(escapes):
        raise _FormError("the number of escaped ids is wrong")
    zigzag = symbols.astype(np.int64) - 1
    change = np.where(zigzag % 2 == 0, zigzag // 2, -(zigzag + 1) // 2)
    ranks = np.where(missing, 0, np.arange(width) + change)
    if ranks.min() < 0 or ranks.max() >= width:
        raise _FormError("a change of rank leads outside the row")
    token_ids = np.take_along_axis(base, ranks, axis=1)
    token_ids[missing] = escapes
    return token_ids


def _chosen_states(rows: _Rows) -> tuple[npt.NDArray[np.uint8], Float32]:
    """How to find each chosen log-probability again, and those that must be written out."""
    hits = rows.token_ids == rows.chosen_ids[:, None]
    in_top = rows.logprobs[np.arange(len(hits)), hits.argmax(axis=1)]
    same = hits.any(axis=1) & (in_top.view(np.int32) == rows.chosen_logprobs.view(np.int32))
    states = np.where(np.isnan(rows.chosen_logprobs), CHOSEN_UNKNOWN, CHOSEN_EXPLICIT).astype(np.uint8)
    states[same] = CHOSEN_IN_TOP
    return states, rows.chosen_logprobs[states == CHOSEN_EXPLICIT]


def _chosen_values(
    token_ids: Int32, logprobs: Float32, chosen_ids: Int32, raw_states: bytes, raw_explicit: bytes
) -> Float32:
    states = np.frombuffer(raw_states, dtype=np.uint8)
    hits = token_ids == chosen_ids[:, None]
    values = logprobs[np.arange(len(hits)), hits.argmax(axis=1)].copy()
    if (states > CHOSEN_EXPLICIT).any() or (~hits.any(axis=1) & (states == CHOSEN_IN_TOP)).any():
        raise _FormError("the log-probabilities of the reference tokens are marked wrongly")
    explicit = states == CHOSEN_EXPLICIT
    if len(raw_explicit) != 4 * int(explicit.sum()):
        raise _FormError("the number of written-out log-probabilities is wrong")
    values[states == CHOSEN_UNKNOWN] = np.nan
    values[explicit] = np.frombuffer(raw_explicit, dtype="<f4")
    return values


# --- streams ---------------------------------------------------------------------------------------------------


def _zigzag(values: Int32) -> UInt32:
    return ((values << 1) ^ (values >> 31)).view(np.uint32)


def _unzigzag(values: UInt32) -> Int32:
    return ((values >> 1) ^ (0 - (values & 1)).astype(np.uint32)).view(np.int32)


def _write_stream(payload: list[bytes], raw: bytes) -> _Stream:
    compressed = lzma.compress(raw, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC32, preset=6) if raw else b""
    payload.append(compressed)
    return _Stream(compressed=len(compressed), raw=len(raw))


def _write_planes(payload: list[bytes], values: UInt32) -> list[_Stream]:
    """The four bytes of each value in four streams, lowest first; a higher stream of zeros is left empty."""
    planes = np.ascontiguousarray(values, dtype="<u4").reshape(-1, 1).view(np.uint8)
    return [
        _write_stream(payload, planes[:, plane].tobytes() if plane == 0 or planes[:, plane].any() else b"")
        for plane in range(4)
    ]


class _StreamReader:
    """Reads the payload's streams one after the other, never more than asked."""

    def __init__(self, payload: memoryview) -> None:
        self._rest = payload
        self._streams: list[_Stream] = []

    def enter(self, streams: Sequence[_Stream]) -> None:
        """Announce the streams that come next."""
        self._streams = list(streams)

    def leave(self) -> None:
        """Everything announced must have been read."""
        if self._streams:
            raise _FormError("streams are left over")

    def read(self, at_least: int, at_most: int) -> bytes:
        """The next stream's bytes; refuses a stream whose length is outside the given bounds."""
        if not self._streams:
            raise _FormError("a stream is missing")
        stream = self._streams.pop(0)
        if not at_least <= stream.raw <= at_most:
            raise _FormError(f"a stream of {stream.raw} bytes where {at_least} to {at_most} are expected")
        if stream.compressed > len(self._rest):
            raise _FormError("the data is shorter than its header says")
        compressed, self._rest = self._rest[: stream.compressed], self._rest[stream.compressed :]
        if not stream.raw:
            return b""
        decoder = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=DECODER_MEMORY)
        raw = decoder.decompress(compressed, max_length=stream.raw + 1)
        if len(raw) != stream.raw:
            raise _FormError("a stream has another length than its header says")
        return raw

    def planes(self, at_least: int, at_most: int) -> UInt32:
        """uint32 values from four streams; see `_write_planes`."""
        lowest = np.frombuffer(self.read(at_least, at_most), dtype=np.uint8)
        values = lowest.astype(np.uint32)
        for plane in range(1, 4):
            raw = np.frombuffer(self.read(0, len(lowest)), dtype=np.uint8)
            if len(raw) not in (0, len(lowest)):
                raise _FormError("byte planes of different lengths")
            if len(raw):
                values |= raw.astype(np.uint32) << np.uint32(8 * plane)
        return values

    @property
    def exhausted(self) -> bool:
        return not len(self._rest)
