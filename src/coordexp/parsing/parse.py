"""Token ids of an answer → :class:`~coordexp.records.ParsedRollout`: its objects, and a prefix of its tokens to which
further entries can be appended. Strict: nothing is repaired or re-encoded."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coordexp.coords import CoordVocab
from coordexp.errors import VocabError
from coordexp.parsing.scanner import (
    WHITE_SPACE,
    Kind,
    Member,
    Node,
    RootScan,
    Scanner,
    elements,
    object_index,
    read_string,
)
from coordexp.records import GEOMETRY_KINDS, DropReason, GeometryKind, ParsedRollout, PredictedObject

_COORD_LITERAL = re.compile(r"<\|coord_(?:0|[1-9][0-9]{0,2})\|>")
_GEOMETRY_OF_KEY: dict[bytes, GeometryKind] = {kind.encode(): kind for kind in GEOMETRY_KINDS}


@dataclass(frozen=True, slots=True)
class _Answer:
    """The answer's bytes and their tokens. ``end``: of the readable part, before the first token that no answer may
    contain. ``coord_at``: byte offset → (token position, bin); ``coord_starts``: its keys, ascending."""

    token_ids: tuple[int, ...]
    data: bytes
    ends: list[int]
    end: int
    coord_at: dict[int, tuple[int, int]]
    coord_starts: list[int]


@dataclass(frozen=True, slots=True)
class _Content:
    """Content of a usable entry. ``value``: half-open byte range of its desc, without quotes; ``coords``: (token
    position, bin) of each coordinate."""

    desc: str
    value: tuple[int, int]
    kind: GeometryKind
    coords: list[tuple[int, int]]


def parse_rollout(token_ids: Sequence[int], vocab: CoordVocab, *, ended: bool | None = None) -> ParsedRollout:
    """Read an answer strictly and cut it to an append-ready prefix. Any token sequence is legal input.

    The prefix decodes to an open root object, cut after its last complete entry (or its ``{``), so that ``prefix +
    serialize_append(…)`` is one valid JSON object. Its tokens are the rollout's own, except where the cut falls inside
    the last one. Entries that are sound JSON but not usable objects stay in the prefix; every entry that is not among
    ``objects`` is counted in ``dropped``.

    Args:
        token_ids: response token ids. ``vocab.eos_id`` ends the answer; it and everything after it are ignored.
        vocab: the tokenizer's vocabulary.
        ended: True when the generator saw a stop token that is not in ``token_ids`` any more.

    Returns:
        The parsed rollout; ``truncated`` when no stop token is in ``token_ids`` and ``ended`` is not True.

    Raises:
        VocabError: the tokenizer cannot write a lone ``{``.
    """
    ids_T = np.fromiter(token_ids, dtype=np.int64, count=len(token_ids))
    stops = np.flatnonzero(ids_T == vocab.eos_id)
    stopped = stops.size > 0
    if stopped:
        ids_T = ids_T[: stops[0]]
    answer = _lay_out(ids_T, vocab)
    ids = answer.token_ids
    scanner = Scanner(answer.data, answer.end, answer.coord_at)
    start = scanner.skip_space(0)
    has_preamble = answer.data[start : min(start + 1, answer.end)] != b"{"
    entries: tuple[Member, ...] = ()
    cuts: list[int] = []
    if has_preamble:
        dropped = _lost_without_root(answer.data)
    else:
        root = scanner.scan_root(start)
        dropped = _lost_after_scan(root, answer)
        entries = root.entries
        cuts = [start + 1, *(entry.value.end for entry in entries if entry.value.kind is Kind.OBJECT)]
    prefix = choose_prefix(ids, answer.ends, cuts, vocab)
    objects, max_index = _read_entries(entries, answer, prefix, dropped, vocab)
    return ParsedRollout(
        objects=objects,
        dropped=dict(dropped),
        prefix_token_ids=prefix.token_ids,
        # The tokens of a prefix write exactly the bytes before the cut.
        prefix_text="{" if prefix.cut is None else answer.data[: prefix.cut].decode("utf-8", errors="replace"),
        max_object_index=max_index,
        truncated=not stopped and not ended,
        num_replaced_tail=prefix.num_replaced,
    )


def _lay_out(ids_T: np.ndarray, vocab: CoordVocab) -> _Answer:
    layout, pieces, unknown = vocab.layout, vocab.pieces, len(vocab)
    ids = tuple(ids_T.tolist())
    data = b"".join([pieces[t] for t in ids if 0 <= t < unknown])
    ids_T = np.where((ids_T >= 0) & (ids_T < unknown), ids_T, unknown)
    ends_T = np.cumsum(layout.length_V[ids_T])
    forbidden_T = np.flatnonzero(layout.forbidden_V[ids_T])
    ends = ends_T.tolist()
    end = ends[-1] if ends else 0
    if forbidden_T.size:
        first = int(forbidden_T[0])
        end = ends[first - 1] if first else 0
    bin_T = layout.bin_V[ids_T]
    at_K = np.flatnonzero(bin_T >= 0)
    starts = (ends_T[at_K] - layout.length_V[ids_T[at_K]]).tolist()
    coord_at = dict(zip(starts, zip(at_K.tolist(), bin_T[at_K].tolist(), strict=True), strict=True))
    return _Answer(ids, data, ends, end, coord_at, starts)


# -- entries that the scan could not read --------------------------------------------------------------------------
#
# After a break no structure can be trusted, so lost entries are counted by how they look.

# A key of an entry: in quotes of some kind, or bare after "{" or ",".
_KEY_LOOKALIKE = re.compile(rb"""(?:["'`]object_[0-9]++\\?["'`]|[{,]\s*+object_[0-9]++["'`]?)\s*+:""")
# An object with a first field other than ``object_{n}``. Group 1: the end of a key before it, with or without the
# colon; then the object is that key's value, and only the key counts.
_OBJECT_LOOKALIKE = re.compile(
    rb"""((?:["'`]|object_[0-9]++)\s*+:?\s*+)?\{\s*+(?!["'`]?object_[0-9])(?=["'`][^"'`\n]{1,99}+["'`]\s*+:)"""
)
# Anything a reader would miss: not white space, and not JSON's punctuation.
_WORD = re.compile(rb"""[^\x00-\x20{}\[\],:"]""")


def _count_lookalikes(data: bytes, start: int) -> tuple[int, int]:
    """How many entries seem to begin at or after ``start``: with an ``object_{n}`` key, and without one."""
    unkeyed = sum(1 for match in _OBJECT_LOOKALIKE.finditer(data, start) if match[1] is None)
    return sum(1 for _ in _KEY_LOOKALIKE.finditer(data, start)), unkeyed


def _lost_after_scan(root: RootScan, answer: _Answer) -> Counter[DropReason]:
    """Count the entry in which the scan stopped, if any, and what follows it. Examples, … for a good entry's rest:

    ==========================================================  =================================
    ``{"object_1": {…}, "object_2": {"desc": "black ca``         truncated
    ``{"object_1": {…}, "object_2": {"desc": cat}, "object_3"…``  malformed, after_break
    ``{"object_1": {…}, {"desc": "cat", …}}``                    unkeyed
    ``{"object_1": {…}}, "object_2": {…}}``                      after_root
    ``{"object_1": {…}, and a dog}``                             prose
    ``{"object_1": {…}} I hope that helps!``                     nothing: the root is complete
    ==========================================================  =================================
    """
    data, lost = answer.data, Counter[DropReason]()
    if root.entry_open:
        simply_ended = root.ran_out and answer.end == len(data)
        lost[DropReason.TRUNCATED if simply_ended else DropReason.MALFORMED] += 1
    # If the scan ran out, the bytes before the end are sound JSON: no other entry can hide there, only its text.
    start = answer.end if root.ran_out else root.stop
    keyed, unkeyed = _count_lookalikes(data, start)
    if root.entry_open and not root.ran_out:
        # The object at ``start`` may be the value of the entry that was counted above: do not count it again.
        rest = data[start:].lstrip(WHITE_SPACE)
        _, unkeyed = _count_lookalikes(data, len(data) - len(rest) + rest.startswith(b"{"))
    if keyed:
        lost[DropReason.AFTER_ROOT if root.closed else DropReason.AFTER_BREAK] += keyed
    if unkeyed:
        lost[DropReason.UNKEYED] += unkeyed
    if not (root.closed or root.entry_open or keyed or unkeyed) and _WORD.search(data, start):
        lost[DropReason.PROSE] += 1
    return lost


def _lost_without_root(data: bytes) -> Counter[DropReason]:
    """Count an answer that does not start with ``{``: no entry of it can be kept."""
    keyed, unkeyed = _count_lookalikes(data, 0)
    if data.lstrip(WHITE_SPACE).startswith(b"["):
        return Counter({DropReason.WRONG_ROOT: max(1, keyed + unkeyed)})
    if keyed or unkeyed:
        return +Counter({DropReason.PREAMBLE: keyed, DropReason.UNKEYED: unkeyed})
    return Counter({DropReason.PROSE: 1} if _WORD.search(data) else {})


def _read_entries(
    entries: Sequence[Member], answer: _Answer, prefix: Prefix, dropped: Counter[DropReason], vocab: CoordVocab
) -> tuple[tuple[PredictedObject, ...], int | None]:
    """The valid objects of the kept prefix and its highest ``object_{n}``; all other entries into ``dropped``."""
    kept_until = -1 if prefix.cut is None else prefix.cut
    # Byte offset after each token of the prefix; a replaced tail has other tokens than the rollout.
    num_own = len(prefix.token_ids) - prefix.num_replaced
    ends = answer.ends[:num_own]
    for token_id in prefix.token_ids[num_own:]:
        ends.append((ends[-1] if ends else 0) + len(vocab.pieces[token_id]))
    objects: list[PredictedObject] = []
    max_index: int | None = None
    for entry in entries:
        index = object_index(entry.key)
        kept = entry.value.end <= kept_until
        if kept and index is not None:
            max_index = index if max_index is None else max(max_index, index)
        if index is None:
            dropped[DropReason.KEY_INVALID] += 1
            continue
        content = _read_object(entry, answer)
        if isinstance(content, DropReason):
            dropped[content] += 1
            continue
        if not kept:
            dropped[DropReason.UNCUTTABLE] += 1
            continue
        first = bisect_right(ends, entry.start)
        own = first + ((ends[first - 1] if first else 0) < entry.start)
        value_start, value_end = content.value
        objects.append(
            PredictedObject(
                index=index,
                desc=content.desc,
                kind=content.kind,
                bins=tuple([k for _, k in content.coords]),
                coord_token_idx=tuple([i for i, _ in content.coords]),
                token_span=(first, bisect_right(ends, entry.value.end - 1) + 1),
                own_token_span=(own, max(own, bisect_right(ends, entry.value.end))),
                desc_token_span=(bisect_right(ends, value_start), bisect_right(ends, value_end - 1) + 1),
            )
        )
    return tuple(objects), max_index


def _read_object(entry: Member, answer: _Answer) -> _Content | DropReason:
    """The content of ``entry``, or the first reason why it is not a usable object."""
    if entry.value.kind is not Kind.OBJECT:
        return DropReason.NOT_AN_OBJECT
    descs: list[Node] = []
    shapes: list[tuple[GeometryKind, Node]] = []
    num_unknown = 0
    for key, _, value in entry.value.items:
        kind = _GEOMETRY_OF_KEY.get(key)
        if kind is not None:
            shapes.append((kind, value))
        elif key == b"desc":
            descs.append(value)
        else:
            num_unknown += 1
    desc = ""
    if descs and descs[0].kind is Kind.STRING:
        desc = read_string(answer.data[descs[0].start + 1 : descs[0].end - 1]).strip()
    if not desc:
        return DropReason.MISSING_DESC
    if len(shapes) > 1:
        return DropReason.MULTIPLE_GEOMETRIES
    if num_unknown or len(descs) > 1:
        return DropReason.UNKNOWN_FIELD
    if not shapes:
        return DropReason.MISSING_GEOMETRY
    kind, array = shapes[0]
    coords = _read_coords(kind, array, answer)
    if isinstance(coords, DropReason):
        return coords
    if kind == "bbox_2d" and (coords[2][1] < coords[0][1] or coords[3][1] < coords[1][1]):
        return DropReason.BOX_INVERTED
    return _Content(desc, (descs[0].start + 1, descs[0].end - 1), kind, coords)


def _read_coords(kind: GeometryKind, array: Node, answer: _Answer) -> list[tuple[int, int]] | DropReason:
    """(token position, bin) of every coordinate of a geometry, each written by exactly one coordinate token."""
    if array.kind is Kind.COORDS:
        # Coordinate tokens cannot overlap and each writes a literal, so as many tokens as literals are the literals.
        # Otherwise ordinary tokens spell one of them.
        first = bisect_right(answer.coord_starts, array.start)
        starts = answer.coord_starts[first : bisect_right(answer.coord_starts, array.end - 1)]
        if len(starts) == answer.data.count(b"<|coord_", array.start, array.end):
            coords = [answer.coord_at[start] for start in starts]
            return coords if _is_enough(kind, len(coords)) else DropReason.WRONG_ARITY
    elif array.kind is not Kind.ARRAY:
        return DropReason.NON_COORD_TOKEN
    values = elements(array, answer.data)
    if kind == "poly" and values and all(value.kind in (Kind.ARRAY, Kind.COORDS) for value in values):
        pairs = [elements(value, answer.data) for value in values]
        if any(len(pair) != 2 for pair in pairs):
            return DropReason.WRONG_ARITY
        values = [coord for pair in pairs for coord in pair]
    coords = []
    num_spelled = 0
    for element in values:
        if element.kind > Kind.COORD:
            return DropReason.NON_COORD_TOKEN
        quote = 1 if element.kind is Kind.STRING else 0
        start, end = element.start + quote, element.end - quote
        coord = answer.coord_at.get(start)
        if coord is not None and answer.ends[coord[0]] == end:
            coords.append(coord)
        elif _COORD_LITERAL.fullmatch(read_string(answer.data[start:end])):
            num_spelled += 1
        else:
            return DropReason.NON_COORD_TOKEN
    if num_spelled:
        # Read as text there is a geometry; but with some values spelled by ordinary tokens, the coordinate tokens
        # and the values no longer match one to one.
        return DropReason.AMBIGUOUS_COORDS if coords else DropReason.NON_COORD_TOKEN
    return coords if _is_enough(kind, len(coords)) else DropReason.WRONG_ARITY


def _is_enough(kind: GeometryKind, num_coords: int) -> bool:
    return num_coords == 4 if kind == "bbox_2d" else num_coords >= 6 and num_coords % 2 == 0


@dataclass(frozen=True, slots=True)
class Prefix:
    """``token_ids``: the rollout's tokens, except for the last ``num_replaced``. ``cut``: the byte of the rollout at
    which they end; None if nothing of the rollout was kept."""

    token_ids: tuple[int, ...]
    num_replaced: int
    cut: int | None


def choose_prefix(token_ids: Sequence[int], ends: Sequence[int], cuts: Sequence[int], vocab: CoordVocab) -> Prefix:
    """The prefix for the last of ``cuts`` (ascending byte offsets, each after the root's ``{`` or the ``}`` of an
    entry) that tokens can realise; a lone ``{`` when none can. ``ends``: byte offset after each token."""
    for cut in reversed(cuts):
        last = bisect_left(ends, cut)  # the token that holds the byte before the cut
        if ends[last] == cut:
            return Prefix(tuple(token_ids[: last + 1]), 0, cut)
        start = ends[last - 1] if last else 0
        tail = exact_encoding(vocab.pieces[token_ids[last]][: cut - start], vocab)
        if tail is not None:
            return Prefix((*token_ids[:last], *tail), len(tail), cut)
    opening = exact_encoding(b"{", vocab)
    if opening is None:
        raise VocabError("the tokenizer cannot write a lone '{'; use a byte-level BPE tokenizer (the Qwen family's)")
    return Prefix(opening, len(opening), None)


def exact_encoding(piece: bytes, vocab: CoordVocab) -> tuple[int, ...] | None:
    """Token ids that write exactly ``piece``; None when the tokenizer has none (a half character, a normalised one)."""
    try:
        text = piece.decode("utf-8")
    except UnicodeDecodeError:
        return None
    ids = tuple(vocab.encode_answer(text))  # the same few pieces in every answer: remembered
    return ids if b"".join([vocab.pieces[token_id] for token_id in ids]) == piece else None
