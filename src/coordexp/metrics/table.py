"""The table of all metrics, one line each: name, unit, rule of combining its values, meaning. Reduction and
documentation read it.

To add one, add its line and run ``python docs/generate_metrics.py``. A metric without a line is an error when it is
emitted: its rule would be unknown. ``<word>`` in a line's name matches one part between slashes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache


class Rule(Enum):
    """How values are combined: over the micro-steps of a step, over the steps of a log line, over ranks."""

    COUNT = ("sum", "sum", "sum")
    SHARE = ("sum", "mean", "sum")  # of a mean over the whole step: micro-steps and ranks each hold a part of it
    SHARE_OF_A = ("sum", "mean of A's", "sum")  # the same of Channel-A's or Channel-B's steps alone
    SHARE_OF_B = ("sum", "mean of B's", "sum")
    SLOTS = ("sum", "mean of steps with slots", "sum")  # a mean over coordinate slots; a step may have none
    SLOTS_OF_A = ("sum", "mean of A's with slots", "sum")
    SLOTS_OF_B = ("sum", "mean of B's with slots", "sum")
    SECONDS = ("sum", "mean", "max")
    SCHEDULE = SECONDS  # the same on every rank; the share of a line's steps
    PEAK = ("max", "max", "max")  # percentiles and 0/1 flags
    STATE = ("last", "last", "sum")
    LEVEL = ("last", "last", "max")
    RATE = ("ratio", "ratio", "ratio")
    TRAINER = ("last", "last", "same")  # transformers logs these itself
    WHOLE_RUN = ("once", "whole run", "same")
    EVALUATION = ("once", "once", "global")  # one value per evaluation, made global by coordexp.evaluation

    def __init__(self, over_micro_steps: str, over_steps: str, over_ranks: str) -> None:
        self.over_micro_steps = over_micro_steps
        self.over_steps = over_steps
        self.over_ranks = over_ranks


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the table. ``ratio`` names the counters that a rate divides; a rate is 0 where the second is 0."""

    name: str
    unit: str
    rule: Rule
    meaning: str
    ratio: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        if (self.ratio is not None) != (self.rule is Rule.RATE):
            raise ValueError(f"metric {self.name}: a rate, and only a rate, names two counters")


def rate(name: str, unit: str, numerator: str, denominator: str, note: str = "") -> Metric:
    """A rate of two counters of its own family."""
    family = name.rsplit("/", 1)[0]
    meaning = f"`{numerator}` / `{denominator}`" + (f". {note}" if note else "")
    return Metric(name, unit, Rule.RATE, meaning, (f"{family}/{numerator}", f"{family}/{denominator}"))


# One line per metric reads as a table; wrapped it would not.
# ruff: noqa: E501
# fmt: off

COUNT, SHARE, SECONDS, PEAK, STATE, LEVEL, SCHEDULE, EVALUATION = (
    Rule.COUNT, Rule.SHARE, Rule.SECONDS, Rule.PEAK, Rule.STATE, Rule.LEVEL, Rule.SCHEDULE, Rule.EVALUATION,
)

# Section of docs/metrics.md → its lines, in their order.
SECTIONS: dict[str, tuple[Metric, ...]] = {
    "losses": (
        Metric("loss", "mixed", SHARE, "the step's total loss: the sum of the terms below"),
        Metric("loss/token_ce/struct_ce", "nats", SHARE, "cross-entropy of the structure that is trained, closing brace and end of turn included; divided by all text positions of positive weight"),
        Metric("loss/token_ce/desc_ce", "nats", SHARE, "cross-entropy of descriptions; divided by the same number, so both add up to one mean"),
        Metric("loss/token_ce/coord_ce", "nats", SHARE, "stage 1 without a coordinate loss: cross-entropy of coordinate tokens over the whole vocabulary, in the same mean"),
        Metric("loss/coord_reg/coord_ce", "nats", SHARE, "hard cross-entropy over the 1000 bins, per coordinate"),
        Metric("loss/coord_reg/soft_ce", "nats", SHARE, "cross-entropy against a Gaussian over bins, per coordinate. Its minimum is the Gaussian's entropy, not 0"),
        Metric("loss/coord_reg/w1", "0..1, share of the axis", SHARE, "Wasserstein-1 distance to the Gaussian, per coordinate"),
        Metric("loss/coord_reg/coord_gate", "nats", SHARE, "−log of the mass on coordinate tokens, per coordinate"),
        Metric("loss/coord_reg/text_gate", "nats", SHARE, "−log(1 − mass on coordinate tokens), per supervised text position, closing brace and end of turn included"),
        Metric("loss/bbox_geo/smoothl1", "share of the image, squared", SHARE, "SmoothL1 of decoded boxes, mean over sides, per box"),
        Metric("loss/bbox_geo/ciou", "0..2 and above", SHARE, "1 − CIoU of decoded boxes, per box"),
    ),
    "coord_diag": (
        Metric("coord_diag/acc_top5", "0..1", Rule.SLOTS, "share of slots with the target bin among the five likeliest"),
        Metric("coord_diag/p_target", "0..1", Rule.SLOTS, "probability of the target bin among the bins"),
        Metric("coord_diag/expected_bin_mae", "bins", Rule.SLOTS, "diagnostic: distance of the expectation over bins to the target, without gradient; no loss reads it"),
        Metric("coord_diag/coord_mass", "0..1", Rule.SLOTS, "probability of any coordinate token"),
    ),
    "rollout": (
        Metric("rollout/samples_total", "samples", COUNT, "answers generated"),
        Metric("rollout/gt_objects_total", "objects", COUNT, "objects of these samples in the data, soft ones too"),
        Metric("rollout/valid_pred_objects_total", "objects", COUNT, "valid objects in the answers"),
        Metric("rollout/matched_total", "objects", COUNT, "matched pairs"),
        Metric("rollout/fp_total", "objects", COUNT, "valid predictions without a match"),
        Metric("rollout/left_out_total", "objects", COUNT, "unmatched predictions that a rewritten answer leaves out"),
        Metric("rollout/fn_appended_total", "objects", COUNT, "objects of the data without a match, soft ones too, which the target writes"),
        Metric("rollout/taken_as_complete_total", "samples", COUNT, "answers of steps with annotations assumed to be complete (``target.complete_above``)"),
        rate("rollout/taken_as_complete_rate", "0..1", "taken_as_complete_total", "samples_total"),
        rate("rollout/match_rate", "0..1", "matched_total", "gt_objects_total"),
        rate("rollout/precision", "0..1", "matched_total", "valid_pred_objects_total", "By geometry at `maskiou_gate`, of any description"),
        Metric("rollout/duplicates_total", "objects", COUNT, "valid predictions that repeat an earlier one: equal description, mask IoU of at least 0.5"),
        rate("rollout/duplicate_rate", "0..1", "duplicates_total", "valid_pred_objects_total"),
        Metric("rollout/gating_rejections_total", "pairs", COUNT, "candidate pairs with overlapping boxes, but a mask IoU under the gate"),
        Metric("match/mixed_kind_total", "pairs", COUNT, "matched pairs of a box and a polygon; [their coordinates](rollout-matching.md#matching) are trained by `coord_reg` alone"),
        Metric("rollout/prefix_coord_targets_total", "tokens", COUNT, "supervised coordinates of matched objects, as the model wrote them"),
        Metric("rollout/parse_dropped_invalid", "entries", COUNT, "entries of answers that are not usable objects, all reasons"),
        Metric("rollout/dropped/<reason>", "entries", COUNT, "`parse_dropped_invalid` by [reason](#reasons); absent while 0"),
        Metric("rollout/excluded_ambiguous_total", "entries", COUNT, "dropped entries of reason `ambiguous_coords`"),
        Metric("rollout/parse_truncated_total", "samples", COUNT, "answers that ended without the end-of-turn token"),
        rate("rollout/parse_truncated_rate", "0..1", "parse_truncated_total", "samples_total"),
        Metric("rollout/gen_new_tokens_total", "tokens", COUNT, "tokens of the answers, without end of turn"),
        rate("rollout/gen_new_tokens_mean", "tokens", "gen_new_tokens_total", "samples_total"),
        Metric("rollout/gen_new_tokens_p99", "tokens", PEAK, "99th percentile of a step's answers"),
        Metric("rollout/decode_greedy", "0 or 1", PEAK, "decoding is greedy"),
        Metric("rollout/decode_sample", "0 or 1", PEAK, "decoding samples"),
        Metric("rollout/decode_beam", "0 or 1", PEAK, "decoding takes the best beam"),
        Metric("rollout/repeat_terminate_active", "0 or 1", PEAK, "every answer was guarded against repetition (`rollout_matching.repeat_terminate`)"),
        Metric("rollout/repeat_terminate_triggered_sequences", "samples", COUNT, "answers that the guard ended, as the engine reports"),
        Metric("rollout/staleness_steps", "steps", PEAK, "age of the rollout weights in optimizer steps: 0, or 1 with `rollout_matching.rollouts_ahead: 1` (0 in a run's first step)"),
        Metric("rollout/server_retries_total", "calls", COUNT, "calls to a rollout server that failed and were repeated; each logs a warning"),
        Metric("rollout/sync_fallbacks_total", "pushes", COUNT, "failed adapter pushes, after which merged weights are pushed; absent while 0"),
        Metric("rollout/sync_bytes_total", "bytes", COUNT, "weights sent to each rollout server"),
        Metric("rollout/records_written_total", "records", COUNT, "[records of samples](#rollout-records) written; both only with `monitor_dump.enabled`"),
        Metric("rollout/records_failed_total", "records", COUNT, "records that could not be written"),
    ),
    "stage2": (
        Metric("stage2/channel_a", "0..1", SCHEDULE, "share of the line's steps that were Channel-A"),
        Metric("stage2/channel_b", "0..1", SCHEDULE, "share of the line's steps that were Channel-B"),
        Metric("stage2/b_ratio_realised", "0..1", LEVEL, "share of Channel-B in all steps so far"),
        Metric("stage2/closure_dropped_total", "samples", COUNT, "Channel-B answers that cannot be followed by a closing brace; left out of the step"),
        Metric("loss/A/<module>/<term>", "as above", Rule.SHARE_OF_A, "a term of Channel-A's objective"),
        Metric("loss/B/<module>/<term>", "as above", Rule.SHARE_OF_B, "a term of Channel-B's objective"),
        Metric("coord_diag/A/<name>", "as above", Rule.SLOTS_OF_A, "Channel-A's coordinate diagnostics, from its last forward"),
        Metric("coord_diag/B/<name>", "as above", Rule.SLOTS_OF_B, "Channel-B's coordinate diagnostics"),
    ),
    "safeguard": (
        Metric("safeguard/truncated_rate", "0..1", LEVEL, "truncated answers among the last 128"),
        Metric("safeguard/duplicate_rate", "0..1", LEVEL, "duplicates among the objects of the last 128 answers"),
    ),
    "packing": (
        Metric("train/samples_total", "samples", COUNT, "samples read for these steps"),
        Metric("train/tokens_total", "tokens", COUNT, "tokens of the trained rows, including prompts"),
        Metric("train/patches_total", "patches", COUNT, "image patches of the trained rows, which the vision tower computes"),
        Metric("train/supervised_total", "positions", COUNT, "positions of the trained rows that the language head computes"),
        Metric("train/augment_left_out_total", "objects", COUNT, "objects whose visible part in a random view is below 0.3 of their area; only with `data.augment`"),
        Metric("train/micro_steps", "rows", COUNT, "forward passes"),
        Metric("train/nonfinite_positions_total", "positions", COUNT, "supervised positions with NaN or infinity among the logits. They are replaced in the loss; if all are broken, training stops"),
        Metric("train/clamped_positions_total", "positions", COUNT, "supervised positions with a finite logit beyond ±10,000, which the loss clamps"),
        Metric("packing/segments_total", "segments", COUNT, "segments trained on"),
        Metric("packing/selected_tokens_total", "tokens", COUNT, "tokens in packed rows"),
        Metric("packing/capacity_tokens_total", "tokens", COUNT, "`global_max_length` times rows"),
        rate("packing/post_rollout_fill", "0..1", "selected_tokens_total", "capacity_tokens_total"),
        Metric("packing/buffer_segments", "segments", STATE, "segments waiting for a later row"),
        Metric("packing/blank_rows_total", "rows", COUNT, "rows without supervision, so that every rank has the same number of Channel-B forwards; absent while 0"),
        Metric("packing/underfilled_rows_total", "rows", COUNT, "rows filled less than `training.packing_min_fill_ratio`; absent while 0"),
    ),
    "time": (
        Metric("time/data_wait_s", "seconds", SECONDS, "waiting for the step's samples: images that loader processes have not read and encoded yet"),
        Metric("time/weight_sync_s", "seconds", SECONDS, "updating the rollout engine's weights; includes the start of a colocated engine"),
        Metric("time/rollout_s", "seconds", SECONDS, "from the step's first request to its last answer"),
        Metric("time/rollout_wait_s", "seconds", SECONDS, "the part of `time/rollout_s` that the step waited for; less than all of it only with `rollout_matching.rollouts_ahead: 1`"),
        Metric("time/target_build_s", "seconds", SECONDS, "parsing, matching, building targets; a second thread does it while other answers decode, so mostly within `time/rollout_s`"),
        Metric("time/pack_s", "seconds", SECONDS, "choosing segments, building the rows' layout, counting over ranks"),
        Metric("time/window_prepare_s", "seconds", SECONDS, "preparation of the step before its first forward: push, wait, building, packing"),
        Metric("time/learner_s", "seconds", SECONDS, "forward and backward of the step's rows"),
        Metric("time/row_wait_s", "seconds", SECONDS, "the part of `time/learner_s` in which the main thread waited for a row to be built (mostly the first of a step)"),
        Metric("time/row_build_s", "seconds", SECONDS, "building rows; a second thread does it during the forward of the previous row"),
        Metric("time/forward_s", "seconds", SECONDS, "the forward part of `time/learner_s`, including the objective; on a GPU, the host's time"),
        Metric("time/optimizer_s", "seconds", SECONDS, "clipping, optimizer and schedule; on a GPU, the host's time: the GPU's remaining work is part of the next step's `time/learner_s`"),
    ),
    "memory": (
        Metric("memory/allocated_peak_gb", "GB", PEAK, "most memory of the GPU in tensors so far; only on GPUs. `coordexp config check` estimates it"),
        Metric("memory/reserved_peak_gb", "GB", PEAK, "most memory that torch has taken from the GPU so far; the part above the tensors' is fragmentation"),
    ),
    "trainer": (
        Metric("grad_norm", "", Rule.TRAINER, "norm of the gradient before clipping"),
        Metric("learning_rate", "", Rule.TRAINER, "of this step"),
        Metric("epoch", "epochs", Rule.TRAINER, "passes over the data so far"),
        Metric("step", "steps", Rule.TRAINER, "optimizer steps so far (in `log_history`)"),
        Metric("train/log_writes_failed", "writes", Rule.TRAINER, "events that TensorBoard, the progress lines or pictures could not write, since the start, on this rank; absent while 0"),
        Metric("train_runtime", "seconds", Rule.WHOLE_RUN, "once, at the end; since the last resume, as the next two"),
        Metric("train_samples_per_second", "1/s", Rule.WHOLE_RUN, "once, at the end"),
        Metric("train_steps_per_second", "1/s", Rule.WHOLE_RUN, "once, at the end"),
        Metric("train_loss", "", Rule.WHOLE_RUN, "mean of `loss`; once, at the end"),
    ),
    "evaluation": (
        Metric("eval_rollout/f1", "0..1", EVALUATION, "2 · matched / (predicted + annotated); 1 if both are 0"),
        Metric("eval_rollout/precision", "0..1", EVALUATION, "matched / predicted; 0 if there are annotations but no predictions"),
        Metric("eval_rollout/recall", "0..1", EVALUATION, "matched / annotated; 0 if there are predictions but no annotations"),
        Metric("eval_rollout/f1_any_desc", "0..1", EVALUATION, "F1 without comparing descriptions"),
        Metric("eval_rollout/mean_matched_iou", "0..1", EVALUATION, "mean mask IoU of matched pairs"),
        Metric("eval_rollout/duplicate_rate", "0..1", EVALUATION, "share of predictions that overlap an earlier one of equal description with IoU of at least 0.5"),
        Metric("eval_rollout/giant_rate", "0..1", EVALUATION, "share of predictions that are unmatched with a box of at least 80 % of the image"),
        Metric("eval_rollout/invalid_rate", "0..1", EVALUATION, "share of entries that the parser dropped"),
        Metric("eval_rollout/truncated_rate", "0..1", EVALUATION, "share of answers that ended without the end-of-turn token"),
        Metric("eval_rollout/repeat_terminated_rate", "0..1", EVALUATION, "share of answers that the repeat guard ended"),
        Metric("eval_rollout/empty_rate", "0..1", EVALUATION, "share of images without a valid prediction"),
        Metric("eval_rollout/<figure>@<iou>", "0..1", EVALUATION, "precision, recall and F1 at the other thresholds of `rollout_matching.eval_detection.f1ish_iou_thrs`"),
        Metric("eval_rollout/AP", "0..1", EVALUATION, "COCO's average precision of boxes, mean over its IoU thresholds and the classes; by pycocotools' rules"),
        Metric("eval_rollout/AP<iou>", "0..1", EVALUATION, "the same at IoU 0.50 or 0.75"),
        Metric("eval_rollout/AP_<area>", "0..1", EVALUATION, "the same for small, medium and large objects (COCO's areas, in pixels)"),
        Metric("eval_rollout/AR100", "0..1", EVALUATION, "COCO's average recall with up to 100 predictions"),
        Metric("eval_rollout/segm_<figure>", "0..1", EVALUATION, "the same figures for masks, with `rollout_matching.eval_detection.use_segm`"),
        Metric("eval_rollout/lost_rate", "0..1", EVALUATION, "share of the objects found by the run's first evaluation (`first_evaluation.jsonl`) that this one misses; from the second evaluation on"),
        Metric("eval_rollout/gained_rate", "0..1", EVALUATION, "share of the objects missed by the run's first evaluation that this one finds"),
        Metric("eval_rollout/false_gained_rate", "0..1", EVALUATION, "share of predictions that are wrong boxes which the run's first evaluation did not have"),
        Metric("eval_rollout/lost_rate_<end>", "0..1", EVALUATION, "the low or high end (`<end>`) of the 95 % interval of the share lost, by bootstrap over images; 0 and 1 if nothing was found at first"),
        Metric("eval_rollout/gained_rate_<end>", "0..1", EVALUATION, "the same of the share gained"),
        Metric("eval_rollout/false_gained_rate_<end>", "0..1", EVALUATION, "the same of the share of new wrong boxes"),
        Metric("eval_rollout/pred_per_image", "objects", EVALUATION, "valid predictions per image"),
        Metric("eval_rollout/gt_per_image", "objects", EVALUATION, "annotated objects per image"),
        Metric("eval_rollout/tokens_per_image", "tokens", EVALUATION, "tokens per answer"),
        Metric("eval_rollout/images", "images", EVALUATION, "images evaluated"),
        Metric("eval_rollout/pred_objects", "objects", EVALUATION, "valid predictions"),
        Metric("eval_rollout/gt_objects", "objects", EVALUATION, "annotated objects"),
        Metric("eval_rollout/matched_objects", "objects", EVALUATION, "matched pairs"),
        Metric("eval_time/runtime_s", "seconds", EVALUATION, "duration of this evaluation, on the logging rank"),
    ),
}
# fmt: on


def all_metrics() -> Iterator[Metric]:
    """Every metric of the table, section by section."""
    for metrics in SECTIONS.values():
        yield from metrics


@cache
def find_metric(name: str) -> Metric | None:
    """The line of the table that ``name`` falls under; an exact name comes before a pattern."""
    return next((metric for pattern, metric in _patterns() if pattern.fullmatch(name)), None)


def rule_of(name: str) -> Rule:
    """How ``name`` is combined. Raises ValueError if no line of the table covers it."""
    metric = find_metric(name)
    if metric is None:
        raise ValueError(
            f"metric {name!r} is not registered: add its line to coordexp.metrics.table and run "
            "python docs/generate_metrics.py"
        )
    return metric.rule


@cache
def _patterns() -> list[tuple[re.Pattern[str], Metric]]:
    def order(metric: Metric) -> tuple[bool, int]:
        literal, placeholder, _ = metric.name.partition("<")
        return bool(placeholder), -len(literal)  # the longest beginning decides: AP_<area> before AP<iou>

    def pattern(name: str) -> re.Pattern[str]:
        return re.compile(r"[^/]+".join(map(re.escape, re.split(r"<[a-z_]+>", name))))

    return [(pattern(metric.name), metric) for metric in sorted(all_metrics(), key=order)]
