"""What holds of every training target, whatever the answer was."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coordexp.coords import COORD_TOKENS, CoordVocab
from coordexp.metrics import rollout_counters
from coordexp.records import GTObject, TokenRole
from support.answers import SampleOutcome, read_json, taught_text

COORD_ROLES = (TokenRole.PREFIX_COORD, TokenRole.TAIL_COORD)
PREFIX_ROLES = (TokenRole.PREFIX_MASKED, TokenRole.PREFIX_COORD, TokenRole.PREFIX_STRUCT, TokenRole.PREFIX_DESC)


def check_target(got: SampleOutcome, truth: Sequence[GTObject], vocab: CoordVocab) -> None:
    target, match = got.target, got.match
    tokens, roles = np.array(target.token_ids), target.roles_T

    # Every object of the scene is either found or appended, once.
    found = [pair.gt_idx for pair in match.pairs]
    assert sorted([*found, *target.appended_gt_idx]) == list(range(len(truth)))
    assert target.appended_gt_idx == match.fn_gt_idx
    assert [*zip(target.matched_pred_idx, target.matched_gt_idx, strict=True)] == [
        (pair.pred_idx, pair.gt_idx) for pair in match.pairs
    ]

    # The text is one JSON object: the kept entries as they were, then the missed objects, numbered on.
    root, kept = read_json(taught_text(got, vocab)), read_json(got.parsed.prefix_text + "}")
    assert root[: len(kept)] == kept
    start = (got.parsed.max_object_index or 0) + 1
    appended = root[len(kept) :]
    assert [key for key, _ in appended] == [f"object_{start + i}" for i in range(len(target.appended_gt_idx))]
    assert [key for key, _ in appended] == [f"object_{n}" for n in target.appended_object_index]
    for (_, body), gt in zip(appended, [truth[j] for j in target.appended_gt_idx], strict=True):
        assert dict(body) == {"desc": gt.desc, gt.kind: [COORD_TOKENS[k] for k in gt.bins]}

    # Roles: a prefix without text supervision, a tail, one closing brace, one stop token.
    assert len(roles) == len(tokens)
    assert target.token_ids[: target.prefix_len] == got.parsed.prefix_token_ids
    in_prefix = np.isin(roles, PREFIX_ROLES)
    assert np.flatnonzero(in_prefix).tolist() == list(range(target.prefix_len))
    assert np.flatnonzero(roles == TokenRole.CLOSE).tolist() == [len(roles) - 2]
    assert np.flatnonzero(roles == TokenRole.EOS).tolist() == [len(roles) - 1]

    # Of the prefix, a matched object's own tokens alone are told apart, and each of its tokens has one of three roles.
    matched = {pair.pred_idx for pair in match.pairs}
    for i, obj in enumerate(got.parsed.objects):
        own, desc = slice(*obj.own_token_span), slice(*obj.desc_token_span)
        inside = {*roles[own].tolist(), *roles[desc].tolist()}
        if i not in matched:
            assert inside <= {TokenRole.PREFIX_MASKED}
            continue
        assert inside == {TokenRole.PREFIX_COORD, TokenRole.PREFIX_STRUCT, TokenRole.PREFIX_DESC} - (
            set() if (roles[own] == TokenRole.PREFIX_STRUCT).any() else {TokenRole.PREFIX_STRUCT}
        )
        assert (roles[desc] == TokenRole.PREFIX_DESC).all()
        assert (roles[list(obj.coord_token_idx)] == TokenRole.PREFIX_COORD).all()
        at_struct = np.flatnonzero(roles[own] == TokenRole.PREFIX_STRUCT) + obj.own_token_span[0]
        written = b"".join(vocab.piece_bytes(int(tokens[p])) for p in at_struct)
        assert b"<|coord_" not in written and written.count(b"{") <= 1 and written.count(b"}") <= 1
    # ... and no other token of the prefix is anyone's.
    of_matched = np.zeros(len(roles), dtype=bool)
    for i in matched:
        of_matched[slice(*got.parsed.objects[i].own_token_span)] = True
        of_matched[slice(*got.parsed.objects[i].desc_token_span)] = True
    assert (roles[: target.prefix_len][~of_matched[: target.prefix_len]] == TokenRole.PREFIX_MASKED).all()

    # Coordinates: on coordinate tokens, in order, each once; in the tail they write their own target.
    assert target.coord_pos_K.tolist() == np.flatnonzero(np.isin(roles, COORD_ROLES)).tolist()
    written = [vocab.bin_of(int(token)) for token in tokens[target.coord_pos_K]]
    assert None not in written
    assert ((target.coord_bin_K >= 0) & (target.coord_bin_K <= 999)).all()
    tail = target.coord_pos_K >= target.prefix_len
    assert np.array(written, dtype=float)[tail].tolist() == target.coord_bin_K[tail].tolist()
    bin_at = dict(zip(target.coord_pos_K.tolist(), target.coord_bin_K.tolist(), strict=True))
    for positions, bins in zip(target.box_pos_M4.tolist(), target.box_bin_M4.tolist(), strict=True):
        assert [bin_at[position] for position in positions] == bins
    num_boxes = sum(got.parsed.objects[pair.pred_idx].kind == "bbox_2d" for pair in match.pairs)
    assert len(target.box_pos_M4) == num_boxes + sum(truth[j].kind == "bbox_2d" for j in target.appended_gt_idx)

    counters = rollout_counters([got])
    assert counters["rollout/matched_total"] + counters["rollout/fn_appended_total"] == len(truth)
    assert counters["rollout/matched_total"] + counters["rollout/fp_total"] == len(got.parsed.objects)
    num_prefix_coords = sum(len(got.parsed.objects[pair.pred_idx].bins) for pair in match.pairs)
    assert counters["rollout/prefix_coord_targets_total"] == num_prefix_coords
