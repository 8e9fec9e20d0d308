"""Pictures and histograms of rollouts for TensorBoard, in the steps whose rollouts are recorded.

Its cost is bounded: a few pictures of bounded size per recorded step, whatever the batch; other steps cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from coordexp.config.rollout import MonitorDumpConfig
from coordexp.data.images import open_rgb
from coordexp.evaluation.drawing import draw_objects
from coordexp.recording.writer import is_due
from coordexp.records import ImageRecord
from coordexp.targets import SampleOutcome

MAX_PICTURES = 4
SIDE = 384
FOUND, MISSED, MATCHED, UNMATCHED = "#00a000", "#d9730d", "#2060ff", "#e00000"


class RolloutPictures(TrainerCallback):
    """Draws the first samples of a due step, before it is trained on.

    Args:
        config: which steps, and how many of their samples.
        outcomes: those of the step that begins, on this rank, each with its sample's record, the objects in the order
            that was matched; none in a step without rollouts.
        writer: TensorBoard's ``SummaryWriter``, or None where this process has none (yet).
    """

    def __init__(
        self,
        config: MonitorDumpConfig,
        outcomes: Callable[[], Sequence[tuple[ImageRecord, SampleOutcome]]],
        writer: Callable[[], Any],
    ) -> None:
        self._config = config
        self._outcomes = outcomes
        self._writer = writer

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        writer, outcomes = self._writer(), self._outcomes()
        if writer is None or not outcomes or not is_due(self._config, state.global_step, int(state.logging_steps or 1)):
            return
        step = state.global_step + 1
        for number, (record, outcome) in enumerate(outcomes[: min(MAX_PICTURES, self._config.max_samples)]):
            writer.add_image(f"rollouts/sample_{number}", draw_rollout(record, outcome), step, dataformats="HWC")
        for name, values in (
            ("rollouts/answer_tokens", [len(outcome.rollout.response_token_ids) for _, outcome in outcomes]),
            ("rollouts/objects_per_answer", [len(outcome.parsed.objects) for _, outcome in outcomes]),
            ("rollouts/missed_per_image", [len(outcome.match.fn_gt_idx) for _, outcome in outcomes]),
        ):
            writer.add_histogram(name, np.array(values), step)


def draw_rollout(record: ImageRecord, outcome: SampleOutcome) -> np.ndarray:
    """The image, ``SIDE`` pixels long, as (H, W, 3) uint8: found objects of its annotation in green, missed ones in
    orange, matched predictions in blue and the others in red. Found objects have no label, as their prediction has
    one."""
    image = open_rgb(record.image)
    scale = SIDE / max(image.size)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    image = image.resize(size, Image.Resampling.BILINEAR)
    missed, unmatched = set(outcome.match.fn_gt_idx), set(outcome.match.fp_pred_idx)
    draw_objects(image, [(obj, FOUND) for k, obj in enumerate(record.objects) if k not in missed], labels=False)
    draw_objects(image, [(obj, MISSED) for k, obj in enumerate(record.objects) if k in missed])
    draw_objects(
        image,
        [(obj, UNMATCHED if k in unmatched else MATCHED) for k, obj in enumerate(outcome.parsed.objects)],
    )
    return np.asarray(image)
