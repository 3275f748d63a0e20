"""Bytes <-> cells of a recording, exactly: ids, their order, and every bit of every float32 come back.

An identical cell (phase, batch size) is stored once; a similar one relative to the first. `rowcoding` turns
rows into small integers; here they become byte planes (all lowest bytes, all second bytes, ...), each an xz
stream. Layout: `MAGIC`, a little-endian uint32 length, a JSON header of that length, then the streams. Files
and digests are the store's business.
"""

from __future__ import annotations

import hashlib
import itertools
import lzma
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pytest_quantguard.baseline import rowcoding
from pytest_quantguard.baseline.recording import Cell, CellKey, PromptRecord
from pytest_quantguard.baseline.rowcoding import RowFormError, UInt32
from pytest_quantguard.config import Phase
from pytest_quantguard.errors import BaselineError
from pytest_quantguard.logprobs.arrays import Float32, Int32, TopLogprobs

MAGIC = b"QGLP\x01\r\n\x00"
MAX_HEADER_BYTES = 64 << 20
MAX_CELL_VALUES = 1 << 28
"""Positions x K of one cell; more is refused, so that a hostile file cannot ask for all memory."""
DECODER_MEMORY = 256 << 20

Count = Annotated[int, Field(ge=0, le=1 << 40)]
Index = Annotated[int, Field(ge=0, le=1 << 30)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Stream(_Part):
    compressed: Count
    raw: Count


class _CellHeader(_Part):
    phase: Phase
    batch_size: int = Field(ge=1)
    batches: list[list[Index]]
    width: int = Field(ge=1, le=1 << 20)
    same_as: Index | None = None
    based_on: Index | None = None
    streams: list[_Stream] = []


class _Header(_Part):
    vocab_size: int = Field(ge=1, le=1 << 31)
    spans: list[Index]
    dictionary: list[_Stream]
    dictionary_groups: list[Index]
    cells: list[_CellHeader] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class _Rows:
    """A cell's rows of all prompts, one under the other: N rows of K."""

    token_ids: Int32  # [N, K]
    logprobs: Float32  # [N, K]
    chosen_ids: Int32  # [N]
    chosen_logprobs: Float32  # [N]

    @classmethod
    def of(cls, cell: Cell) -> _Rows:
        return cls(
            np.concatenate([rows.token_ids for rows in cell.rows]),
            np.concatenate([rows.logprobs for rows in cell.rows]),
            np.concatenate([rows.chosen_ids for rows in cell.rows]),
            np.concatenate([rows.chosen_logprobs for rows in cell.rows]),
        )

    def split(self, spans: Sequence[int], vocab_size: int) -> tuple[TopLogprobs, ...]:
        """One TopLogprobs per prompt. Cells may share them, so they are read-only."""
        for array in (self.token_ids, self.logprobs, self.chosen_ids, self.chosen_logprobs):
            array.setflags(write=False)
        edges = itertools.accumulate(spans, initial=0)
        return tuple(
            TopLogprobs(
                token_ids=self.token_ids[start:end],
                logprobs=self.logprobs[start:end],
                chosen_ids=self.chosen_ids[start:end],
                vocab_size=vocab_size,
                chosen_logprobs=self.chosen_logprobs[start:end],
            )
            for start, end in itertools.pairwise(edges)
        )

    def digest(self) -> str:
        digest = hashlib.sha256(str(self.token_ids.shape).encode())
        for array in (self.token_ids, self.logprobs, self.chosen_logprobs):
            digest.update(array.tobytes())
        return digest.hexdigest()


def encode_cells(cells: Mapping[CellKey, Cell], prompts: Sequence[PromptRecord]) -> bytes:
    """Code all cells of a recording; `decode_cells` with the same prompts gives them back bit for bit.

    The chosen ids of a row are those of the prompt's span and are not stored again. Raises ValueError where a
    cell breaks the form that `Cell` and `PromptRecord` promise: a fault of the program, not of its user.
    """
    vocab_size = _check_form(cells, prompts)
    ordered = [(cell, _Rows.of(cell)) for cell in cells.values()]
    first_with: dict[str, int] = {}
    same_as = [first_with.setdefault(rows.digest(), index) for index, (_, rows) in enumerate(ordered)]
    distinct = [ordered[index][1].token_ids.ravel() for index in sorted(set(same_as))]
    dictionary, groups = rowcoding.frequency_order(np.concatenate(distinct))
    names = np.zeros(vocab_size, dtype=np.uint32)
    names[dictionary] = np.arange(len(dictionary), dtype=np.uint32)

    writer = _StreamWriter()
    writer.planes(rowcoding.dictionary_steps(dictionary, groups))
    dictionary_streams = writer.take()
    headers = []
    for index, (cell, rows) in enumerate(ordered):
        header = _CellHeader(
            phase=cell.key.phase,
            batch_size=cell.key.batch_size,
            batches=[list(batch) for batch in cell.batches],
            width=rows.token_ids.shape[1],
        )
        if same_as[index] != index:
            headers.append(header.model_copy(update={"same_as": same_as[index]}))
            continue
        based_on = 0 if index else None
        _encode_rows(writer, rows, names, None if based_on is None else ordered[based_on][1], vocab_size)
        headers.append(header.model_copy(update={"based_on": based_on, "streams": writer.take()}))
    whole = _Header(
        vocab_size=vocab_size,
        spans=[len(prompt.span_ids) for prompt in prompts],
        dictionary=dictionary_streams,
        dictionary_groups=groups,
        cells=headers,
    )
    text = whole.model_dump_json(exclude_defaults=True).encode()
    return b"".join([MAGIC, struct.pack("<I", len(text)), text, *writer.payload])


def decode_cells(payload: bytes, prompts: Sequence[PromptRecord]) -> dict[CellKey, Cell]:
    """Inverse of `encode_cells`. Raises BaselineError for anything that `encode_cells` did not write.

    A stream never expands beyond what the prompts and K ask for. The arrays are read-only.
    """
    try:
        return _decode(payload, prompts)
    except (RowFormError, lzma.LZMAError, ValidationError, struct.error) as error:
        raise BaselineError(f"The log-probability data is not in this package's format: {error}.") from error


def _check_form(cells: Mapping[CellKey, Cell], prompts: Sequence[PromptRecord]) -> int:
    """The vocabulary size that all rows share; raises ValueError for what a recording must not hold."""
    if not cells or not prompts or any(not len(prompt.span_ids) for prompt in prompts):
        raise ValueError("a recording needs at least one cell, one prompt and one scored position per prompt")
    vocab_sizes = {rows.vocab_size for cell in cells.values() for rows in cell.rows}
    if len(vocab_sizes) != 1:
        raise ValueError(f"all rows must have one vocabulary size, not {sorted(vocab_sizes)}")
    vocab_size = vocab_sizes.pop()
    for key, cell in cells.items():
        if key != cell.key or len(cell.rows) != len(prompts):
            raise ValueError(f"cell {key} holds {len(cell.rows)} of {len(prompts)} prompts, as {cell.key}")
        if len({rows.width for rows in cell.rows}) != 1:
            raise ValueError(f"cell {key}: the rows have different K")
        if not _holds_each_once(cell.batches, len(prompts)):
            raise ValueError(f"cell {key}: the batches do not hold each of the {len(prompts)} prompts once")
        for prompt, rows in zip(prompts, cell.rows, strict=True):
            where = f"cell {key}, prompt {prompt.id}"
            if not np.array_equal(rows.chosen_ids, prompt.span_ids):
                raise ValueError(f"{where}: chosen_ids are not the prompt's span")
            if rows.token_ids.min() < 0 or rows.token_ids.max() >= vocab_size:
                raise ValueError(f"{where}: a token id is outside 0..{vocab_size - 1}")
            if not np.isfinite(rows.logprobs).all():
                raise ValueError(f"{where}: non-finite log-probabilities")
    return vocab_size


def _holds_each_once(batches: Sequence[Sequence[int]], prompts: int) -> bool:
    return sorted(index for batch in batches for index in batch) == list(range(prompts))


def _encode_rows(
    writer: _StreamWriter, rows: _Rows, names: UInt32, base: _Rows | None, vocab_size: int
) -> None:
    """Write a cell's streams in the order in which `_decode_rows` reads them."""
    if base is None:
        writer.planes(names[rows.token_ids])
        writer.planes(np.zeros(0, dtype=np.uint32))
    else:
        ranks = rowcoding.ranks_in(base.token_ids, rows.token_ids, vocab_size)
        writer.planes(rowcoding.rank_changes(ranks))
        writer.planes(names[rows.token_ids[ranks < 0]])
    grids, levels, residuals = rowcoding.to_levels(rows.logprobs)
    states, explicit = rowcoding.chosen_states(
        rows.token_ids, rows.logprobs, rows.chosen_ids, rows.chosen_logprobs
    )
    writer.planes(rows.logprobs[:, 0].copy().view(np.uint32))
    writer.stream(grids.tobytes())
    writer.planes(rowcoding.steps_of(levels))
    writer.planes(rowcoding.zigzag(residuals))
    writer.stream(states.tobytes())
    writer.planes(explicit.view(np.uint32))


def _decode(payload: bytes, prompts: Sequence[PromptRecord]) -> dict[CellKey, Cell]:
    header, streams = _open(payload)
    spans = [len(prompt.span_ids) for prompt in prompts]
    if header.spans != spans:
        raise RowFormError(f"its {len(header.spans)} scored spans are not those of the {len(spans)} prompts")
    chosen_ids = np.concatenate([prompt.span_ids for prompt in prompts]).astype(np.int32)
    streams.announce(header.dictionary)
    steps = streams.planes(1, header.vocab_size)
    dictionary = rowcoding.read_dictionary(steps, header.dictionary_groups, header.vocab_size)
    decoded: list[_Rows] = []
    cells: dict[CellKey, Cell] = {}
    for cell in header.cells:
        key = CellKey(cell.phase, cell.batch_size)
        if key in cells or not _holds_each_once(cell.batches, len(prompts)):
            raise RowFormError(f"cell {key} occurs twice, or does not hold each prompt once")
        decoded.append(_decode_cell(streams, cell, decoded, chosen_ids, dictionary))
        rows = decoded[-1].split(spans, header.vocab_size)
        cells[key] = Cell(key, tuple(tuple(batch) for batch in cell.batches), rows)
    streams.close()
    return cells


def _open(payload: bytes) -> tuple[_Header, _StreamReader]:
    view = memoryview(payload)
    if view[: len(MAGIC)] != MAGIC:
        raise RowFormError("it does not begin with this format's mark")
    (length,) = struct.unpack_from("<I", view, len(MAGIC))
    start = len(MAGIC) + 4
    if length > MAX_HEADER_BYTES or start + length > len(view):
        raise RowFormError("it is shorter than its header says")
    header = _Header.model_validate_json(bytes(view[start : start + length]))
    return header, _StreamReader(view[start + length :])


def _decode_cell(
    streams: _StreamReader,
    header: _CellHeader,
    decoded: Sequence[_Rows],
    chosen_ids: Int32,
    dictionary: Int32,
) -> _Rows:
    source = header.based_on if header.same_as is None else header.same_as
    if source is not None and source >= len(decoded):
        raise RowFormError("a cell refers to one that does not come before it")
    if header.same_as is not None:
        return decoded[header.same_as]
    if len(chosen_ids) * header.width > MAX_CELL_VALUES:
        raise RowFormError(
            f"a cell of {len(chosen_ids)} positions with {header.width} tokens each is too large"
        )
    streams.announce(header.streams)
    base = None if header.based_on is None else decoded[header.based_on]
    return _decode_rows(streams, chosen_ids, header.width, dictionary, base)


def _decode_rows(
    streams: _StreamReader, chosen_ids: Int32, width: int, dictionary: Int32, base: _Rows | None
) -> _Rows:
    count = len(chosen_ids)
    total = count * width
    symbols = streams.planes(total, total).reshape(count, width)
    missing_ids = rowcoding.look_up(dictionary, streams.planes(0, 0 if base is None else total))
    if base is None:
        token_ids = rowcoding.look_up(dictionary, symbols)
    else:
        token_ids = rowcoding.apply_rank_changes(base.token_ids, symbols, missing_ids)
    first = streams.planes(count, count).view(np.float32)
    grids = np.frombuffer(streams.read(count, count), dtype=np.uint8)
    levels = rowcoding.levels_of(streams.planes(total - count, total - count).reshape(count, width - 1))
    residuals = rowcoding.unzigzag(streams.planes(total, total)).reshape(count, width)
    logprobs = rowcoding.from_levels(first, grids, levels, residuals)
    states = np.frombuffer(streams.read(count, count), dtype=np.uint8)
    explicit = streams.planes(0, count).view(np.float32)
    chosen_logprobs = rowcoding.chosen_values(token_ids, logprobs, chosen_ids, states, explicit)
    return _Rows(token_ids, logprobs, chosen_ids, chosen_logprobs)


class _StreamWriter:
    """Collects compressed streams and their lengths."""

    def __init__(self) -> None:
        self.payload: list[bytes] = []
        self._streams: list[_Stream] = []

    def stream(self, raw: bytes) -> None:
        compressed = lzma.compress(raw, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC32) if raw else b""
        self.payload.append(compressed)
        self._streams.append(_Stream(compressed=len(compressed), raw=len(raw)))

    def planes(self, values: UInt32) -> None:
        """The four bytes of each value in four streams, lowest first; a higher one of zeros is left empty."""
        planes = np.ascontiguousarray(values, dtype="<u4").reshape(-1, 1).view(np.uint8)
        for plane in range(4):
            column = planes[:, plane]
            self.stream(column.tobytes() if plane == 0 or column.any() else b"")

    def take(self) -> list[_Stream]:
        """The lengths of the streams written since the last call."""
        streams, self._streams = self._streams, []
        return streams


class _StreamReader:
    """Reads streams one after the other, and never more than is asked for."""

    def __init__(self, payload: memoryview) -> None:
        self._rest = payload
        self._streams: list[_Stream] = []

    def announce(self, streams: Sequence[_Stream]) -> None:
        """Say which streams come next; those announced before must have been read."""
        if self._streams:
            raise RowFormError("streams are left over")
        self._streams = list(streams)

    def close(self) -> None:
        """Everything must have been read."""
        self.announce([])
        if len(self._rest):
            raise RowFormError("bytes are left over")

    def read(self, at_least: int, at_most: int) -> bytes:
        """The next stream's bytes; a stream whose length is outside the bounds is refused unread."""
        if not self._streams:
            raise RowFormError("a stream is missing")
        stream = self._streams.pop(0)
        if not at_least <= stream.raw <= at_most:
            raise RowFormError(f"a stream of {stream.raw} bytes, expected {at_least} to {at_most}")
        if stream.compressed > len(self._rest):
            raise RowFormError("it is shorter than its header says")
        compressed, self._rest = self._rest[: stream.compressed], self._rest[stream.compressed :]
        if not stream.raw:
            return b""
        decoder = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=DECODER_MEMORY)
        raw = decoder.decompress(compressed, max_length=stream.raw + 1)
        if len(raw) != stream.raw or not decoder.eof or decoder.unused_data:
            raise RowFormError("a stream has another length than its header says")
        return raw

    def planes(self, at_least: int, at_most: int) -> UInt32:
        """uint32 values from four streams; see `_StreamWriter.planes`."""
        lowest = np.frombuffer(self.read(at_least, at_most), dtype=np.uint8)
        values = lowest.astype(np.uint32)
        for plane in range(1, 4):
            raw = np.frombuffer(self.read(0, len(lowest)), dtype=np.uint8)
            if len(raw) not in (0, len(lowest)):
                raise RowFormError("byte planes of different lengths")
            if len(raw):
                values |= raw.astype(np.uint32) << np.uint32(8 * plane)
        return values
