"""Counters of a rollout window: what was parsed, matched, appended and dropped. Additive over samples and ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from coordexp.matching import duplicate_indices
from coordexp.records import DropReason, TokenRole
from coordexp.targets import SampleOutcome


def rollout_counters(outcomes: Iterable[SampleOutcome]) -> Counter[str]:
    """Sums by name (family ``rollout/``). No IoU-type number is among them: those belong to evaluation."""
    sums: Counter[str] = Counter()
    for outcome in outcomes:
        parsed, match = outcome.parsed, outcome.match
        sums["rollout/samples_total"] += 1
        sums["rollout/valid_pred_objects_total"] += len(parsed.objects)
        sums["rollout/duplicates_total"] += len(duplicate_indices(parsed.objects))
        sums["rollout/parse_dropped_invalid"] += parsed.num_dropped
        sums["rollout/excluded_ambiguous_total"] += parsed.dropped.get(DropReason.AMBIGUOUS_COORDS, 0)
        for reason, count in parsed.dropped.items():
            sums[f"rollout/dropped/{reason.value}"] += count
        sums["rollout/parse_truncated_total"] += int(outcome.rollout.truncated)
        sums["rollout/repeat_terminate_triggered_sequences"] += int(outcome.rollout.repeat_terminated)
        sums["rollout/gt_objects_total"] += len(match.pairs) + len(match.fn_gt_idx)
        sums["rollout/matched_total"] += len(match.pairs)
        sums["rollout/fp_total"] += len(match.fp_pred_idx)
        sums["rollout/left_out_total"] += len(outcome.target.left_out_pred_idx)
        sums["rollout/taken_as_complete_total"] += int(outcome.taken_as_complete)
        sums["rollout/fn_appended_total"] += len(match.fn_gt_idx)
        sums["rollout/gating_rejections_total"] += match.num_gate_rejections
        sums["rollout/gen_new_tokens_total"] += len(outcome.rollout.response_token_ids)
        sums["rollout/prefix_coord_targets_total"] += int(
            (outcome.target.roles_T[outcome.target.coord_pos_K] == TokenRole.PREFIX_COORD).sum()
        )
    return sums
