"""Coordinate tokens: vocabulary and serialisation. Torch-free."""

from coordexp.coords.serialize import FieldOrder, Fragment, append_fragment, serialize_append, serialize_objects
from coordexp.coords.vocab import COORD_TOKENS, TURN_END, CoordVocab, coord_token

__all__ = [
    "COORD_TOKENS",
    "TURN_END",
    "CoordVocab",
    "FieldOrder",
    "Fragment",
    "append_fragment",
    "coord_token",
    "serialize_append",
    "serialize_objects",
]
