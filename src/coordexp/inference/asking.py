"""How a checkpoint is asked for its answers to images, by ``coordexp predict`` and ``coordexp evaluate`` alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from coordexp.config.resolved import AnswerConfig
from coordexp.data.dataset import ObjectOrdering, RecordDataset
from coordexp.data.progress_bar import reporting
from coordexp.data.tiles import CutTiles, Tiling, tile_records
from coordexp.engine.trainer.backends import check_backend
from coordexp.evaluation.answers import samples_of_batch
from coordexp.inference.session import InferenceSession, open_session, with_several_answers
from coordexp.records import ImageRecord
from coordexp.temporary import temporary_folder


@dataclass(frozen=True, slots=True)
class Asking:
    """``classes``: the only descriptions that answers may contain, empty for any. ``answers``: per image, merged into
    one (:func:`~coordexp.evaluation.several_answers.merge_answers`). ``tiling``: tiles are answered, and their answers
    merged (:func:`~coordexp.evaluation.join_tiles.merge_tiles`)."""

    classes: tuple[str, ...] = ()
    answers: int = 1
    tiling: Tiling | None = None

    def checked(self, config: AnswerConfig) -> AnswerConfig:
        """``config`` for so many answers. Raises ConfigError as :func:`with_several_answers` and :func:`check_backend`,
        before anything is loaded."""
        config = with_several_answers(config, self.answers)
        check_backend(config.rollout_matching, bool(self.classes))
        return config

    def settings(self, config: AnswerConfig) -> dict[str, Any]:
        """The settings on which answers depend, besides model and images, as JSON; None for one without effect."""
        rollout = config.rollout_matching
        # Number types of an engine, if they are not the model's.
        dtype, cache = config.model.dtype, "auto"
        if rollout.rollout_backend == "vllm":
            dtype, cache = rollout.vllm.dtype, rollout.vllm.given_args.get("kv_cache_dtype", "auto")
        return {
            "answers": None if self.answers == 1 else self.answers,
            "tiles": None if self.tiling is None else asdict(self.tiling),
            "classes": list(self.classes) or None,
            "prompt": config.template.prompt,
            "system": config.template.system,
            "vllm.dtype": None if dtype == config.model.dtype else dtype,
            "vllm.engine_args.kv_cache_dtype": None if cache == "auto" else cache,
            "dtype": config.model.dtype,
            "seed": config.seed,
            "backend": rollout.rollout_backend,
            "max_new_tokens": rollout.max_new_tokens,
            "decoding": rollout.decoding.model_dump(mode="json"),
            "num_beams": rollout.num_beams,
            "repetition_penalty": rollout.repetition_penalty,
            "repeat_terminate": rollout.repeat_terminate.model_dump(mode="json"),
        }

    def samples(self, records: Sequence[ImageRecord]) -> Sequence[ImageRecord]:
        """What is answered of ``records``: themselves, or their tiles."""
        return records if self.tiling is None else tile_records(records, self.tiling)

    @contextmanager
    def loaded(
        self,
        samples: Sequence[ImageRecord],
        config: AnswerConfig,
        model: Path,
        ordering: ObjectOrdering,
        console: Console,
        description: str,
    ) -> Iterator[tuple[InferenceSession, dict[str, Any]]]:
        """Load ``model`` to answer ``samples``, of which tiles are cut when they are read, and show its progress.
        Yields the arguments of :func:`~coordexp.evaluation.answers.answer_batches` too, but for positions and
        scorer."""
        counted = "images" if self.tiling is None else "tiles"
        with (
            open_session(config, model, self.classes) as session,
            reporting(console, description, counted, stays=True) as on_progress,
            temporary_folder("coordexp-tiles-") as cut,
        ):
            if self.tiling is not None:
                samples = CutTiles(samples, cut, samples_of_batch(session.backend, self.answers))
            yield (
                session,
                {
                    "dataset": RecordDataset(samples, session.encoder.encode, ordering, config.seed),
                    "backend": session.backend,
                    "vocab": session.vocab,
                    "seed": config.seed,
                    "on_progress": on_progress,
                    "on_answer": on_progress,
                    "count": self.answers,
                },
            )


ONE_ANSWER = Asking()  # one answer to each whole image, with any description
