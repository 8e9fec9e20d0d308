"""Coordinate tokens: vocabulary, serialisation, soft targets. Torch-free."""

from coordexp.coords.serialize import FieldOrder, Fragment, append_fragment, serialize_append, serialize_objects
from coordexp.coords.soft_targets import gaussian_targets
from coordexp.coords.vocab import COORD_TOKENS, TURN_END, CoordVocab, coord_token

__all__ = [
    "COORD_TOKENS",
    "TURN_END",
    "CoordVocab",
    "FieldOrder",
    "Fragment",
    "append_fragment",
    "coord_token",
    "gaussian_targets",
    "serialize_append",
    "serialize_objects",
]
