"""A thin ``transformers.Trainer``: the window prepares a step, the model runs it, the objective scores it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from accelerate import DistributedType

from coordexp import distributed
from coordexp.config.objective import Channel
from coordexp.coords import CoordVocab
from coordexp.data.dataset import RecordDataset, Sample
from coordexp.errors import RunStopped, TrainingDiverged
from coordexp.evaluation import EvaluationOptions
from coordexp.evaluation.answering import COUNTS_ONLY, Scorer, evaluate_dataset
from coordexp.metrics import MetricsPayload, SampleOutcome
from coordexp.modeling.inputs import VisionTower, to_device
from coordexp.modeling.load import LoadedModel
from coordexp.objective import HeadQuery, HeadScores, SupervisionTensors
from coordexp.objective.supervision import tensors_to_device
from coordexp.recording.token_losses import token_losses
from coordexp.recording.writer import RolloutRecorder
from coordexp.records import ImageRecord, PackedRow
from coordexp.rollouts import RolloutBackend, synced
from coordexp.training.drift import DriftWatch
from coordexp.training.master_weights import MasterWeights, refuse_master_weights, with_master_weights
from coordexp.training.objective_step import TrainingObjective, name_channel
from coordexp.training.optimizer import LearningRates, grouped, parameter_groups
from coordexp.training.parallel import shard_on_cpus
from coordexp.training.reading import WindowReader
from coordexp.training.row_prefetch import FiguresOnDevice, RowBuilder, RowPrefetch
from coordexp.training.saving import SavingTrainer
from coordexp.training.two_channel import TwoChannelBuilder
from coordexp.training.window import Window, WindowBuilder


class CoordExpTrainer(SavingTrainer):
    """Stage 1, stage 2 and both channels alike: they differ in where a window's rows come from and in what is learned
    from a row.

    ``get_batch_samples`` is where transformers hands over the raw micro-batches of a whole accumulation window; a step
    is prepared there, so its global counts exist before its first backward. ``compute_loss`` is then only forward,
    objective, scale.
    """

    def __init__(
        self,
        *,
        loaded: LoadedModel,
        window_builder: WindowBuilder | TwoChannelBuilder,
        objectives: Mapping[Channel | None, TrainingObjective],
        eval_backend: RolloutBackend,
        rollout_matching_cfg: Mapping[str, Any],
        learning_rates: LearningRates,
        master_weights: bool = False,
        recorder: RolloutRecorder | None = None,
        measured: EvaluationOptions | None = COUNTS_ONLY,
        scorer: Scorer | None = None,
        **kwargs: Any,
    ) -> None:
        """``master_weights``: the optimizer steps float32 copies of the model's weights."""
        as_they_are: Any = list
        super().__init__(loaded=loaded, buffer=window_builder.buffer, data_collator=as_they_are, **kwargs)
        self._windows = None if self._ahead is None else WindowReader(self._read, self._begin_epoch_of)
        shard_on_cpus(self)
        # Shares are already divided by the whole step's counts: dividing again by micro-steps would be wrong.
        self.loss_is_scaled_for_ga = True
        self.window_builder = window_builder
        self.window: Window | None = None
        self._rows: RowPrefetch | None = None  # of the window under way
        self._records: tuple[ImageRecord, ...] = ()  # of the window's samples, as they were trained on
        self._vocab: CoordVocab = loaded.vocab
        self._rope_index, self._tower = loaded.model.model.get_rope_index, VisionTower.from_model(loaded.model)
        self._objectives = objectives
        self._figures = FiguresOnDevice()
        self._drift: DriftWatch | None = None
        self._eval_backend = eval_backend
        self._measured = measured
        self._scorer = scorer
        self.rollout_matching_cfg = rollout_matching_cfg
        self._learning_rates = learning_rates
        self._has_masters = master_weights
        self._recorder = recorder
        self.asked_to_stop: Callable[[], int | None] = lambda: None
        self._at_last_row = self._agreed = False  # of the micro-step under way, and what all ranks know of it
        self._held: Exception | None = None

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """transformers' optimizer over groups of ours: each part of the model has its own learning rate."""
        if self.optimizer is not None:
            return super().create_optimizer(model)
        tuned: Any = self.model if model is None else model
        decaying = self.get_decay_parameter_names(tuned)
        groups = parameter_groups(tuned, self._learning_rates, self.args.weight_decay, decaying)
        standard = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, tuned)
        optimizer_class, arguments = grouped(standard, groups, self._learning_rates)
        if self._has_masters:
            optimizer_class = with_master_weights(optimizer_class)
        self.optimizer_cls_and_kwargs = optimizer_class, arguments
        optimizer = super().create_optimizer(model)
        if not self._has_masters:
            refuse_master_weights(optimizer)
        elif self.args.world_size == 1:
            cast(MasterWeights, optimizer).sum_in_float32()
        return optimizer

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], None]:
        """The micro-batches of one optimizer step, from which its window is prepared. No item count: the window has its
        own."""
        self.restore_log_line()
        if self.state.global_step >= self.state.max_steps:
            return [], None  # a finished run, resumed: transformers would look at max_steps only after one step more
        step = self.state.global_step + 1
        self.begin_step()
        with self.saving_before_giving_up(f"step {step}"):
            with distributed.raise_on_all_ranks(f"reading the samples of step {step}"):
                read = self._read if self._windows is None else self._windows.take
                raw = read(epoch_iterator, num_batches)
            if not raw:
                return [], None
            started = time.perf_counter()
            self.window = self.window_builder.prepare(raw, self.state.global_step)
            self._records = tuple(sample.record for batch in raw for sample in batch)
            self._rows, self._figures = RowPrefetch(self._row_builder(), self.window.micro_steps), FiguresOnDevice()
            with self._rows:
                asked = self._ask_ahead()
                with distributed.raise_on_all_ranks(f"records of step {step}"):
                    recorded = self._record(raw, self.window)
        prepared_s = time.perf_counter() - started
        self.sums.add({**self.window.metrics, **asked, **recorded, "time/window_prepare_s": prepared_s})
        self.sums.count_step(self.window.channel)
        return self._rows.micro_steps, None

    @property
    def window_outcomes(self) -> list[tuple[ImageRecord, SampleOutcome]]:
        """The outcomes of the step under way, each with its sample's record; none in a step without rollouts."""
        if self.window is None or not self.window.outcomes:
            return []
        return list(zip(self._records, self.window.outcomes, strict=True))

    def _read(self, batches: Iterator[Any], num_batches: int) -> list[list[Sample]]:
        raw, _ = super().get_batch_samples(batches, num_batches, self.args.device)
        return [[_owning_memory(sample) for sample in batch] for batch in raw]

    def _begin_epoch_of(self, global_step: int) -> Iterator[Any]:
        """As transformers begins the epoch that holds the step after ``global_step`` finished ones."""
        loader: Any = self.callback_handler.train_dataloader
        epoch = global_step // -(-len(loader) // self.args.gradient_accumulation_steps)
        sampler: Any = getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)
        for one in (loader, sampler):
            if hasattr(one, "set_epoch"):
                one.set_epoch(epoch)
        return iter(loader)

    def _ask_ahead(self) -> Mapping[str, float]:
        """Read the next step's samples and, where it learns from rollouts, have its window asked for."""
        coming = self.state.global_step + 1
        if self._windows is None or self._ahead is None or coming >= self.state.max_steps:
            return {}
        try:
            with distributed.raise_on_all_ranks(f"reading the samples of step {coming + 1}"):
                raw = self._windows.look_ahead(coming, self.args.gradient_accumulation_steps)
        except Exception as failure:  # on every rank alike; raised when that step takes its window
            self._windows.fail(failure)
            return {}
        return self._ahead.ask(raw, self.state.global_step) if self._ahead.asks_at(self.state.global_step) else {}

    def _record(self, raw: Sequence[Sequence[Sample]], window: Window) -> Mapping[str, float]:
        if self._recorder is None or not window.outcomes:
            return {}
        self._recorder.offer(self.state.global_step, int(self.state.logging_steps or 1), raw, window.outcomes)
        return self._recorder.take_counters()

    def _row_builder(self) -> RowBuilder:
        return RowBuilder(
            rope_index=self._rope_index,
            tower=self._tower,
            image_token_id=self._loaded.image_token_id,
            attention=self._loaded.attention,
            dtype=next(self._loaded.model.parameters()).dtype,
            objective=self._objective_of_step(),
            device=self.args.device,
        )

    def _objective_of_step(self) -> TrainingObjective:
        assert self.window is not None, "a row without a prepared window"
        return self._objectives[self.window.channel]

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        device = self.args.device
        return {
            "model": to_device(inputs["model"], device),
            "supervision": tensors_to_device(inputs["supervision"], device),
            "queries": tensors_to_device(inputs["queries"], device),
            "row": inputs["row"],
        }

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of one micro-step's rows, timed; gradients are exchanged behind the last of them."""
        started = time.perf_counter()
        loss = torch.zeros((), device=self.args.device)
        assert self._rows is not None, "a micro-step without a prepared window"
        with self.saving_before_giving_up(f"step {self.state.global_step + 1}"), self._rows, self._failing_together():
            for number, row in enumerate(inputs, start=1):
                self._at_last_row = number == len(inputs)
                with nullcontext() if self._at_last_row else self._without_exchange(model):
                    loss = loss + super().training_step(model, row, num_items_in_batch)
            if self.accelerator.sync_gradients:
                self._look()
        self.sums.add({"time/learner_s": time.perf_counter() - started, **self._rows.take_seconds()})
        return loss

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """What one rank alone raises in a micro-step ends it on all, before they exchange gradients: an error in the
        backward that exchanges them comes too late. Sharded ranks exchange all the time, and lose each other."""
        self._agreed = self.is_fsdp_enabled or self.is_deepspeed_enabled
        try:
            if (failure := self._held) is not None:
                self._agree(failure)
            yield
        except Exception as error:
            if not self._agreed:
                self._agree(error)
            if self.accelerator.sync_gradients or distributed.is_every_ranks(error):
                raise
            self._held = error  # the others are behind this micro-step's agreement: they hear of it in the next

    def _agree(self, failure: Exception | None) -> None:
        """Every rank comes here once in a micro-step.

        Raises: on all ranks, what one of them has to say.
        """
        self._agreed = True
        distributed.raise_any_failure(failure, f"step {self.state.global_step + 1}")

    @contextmanager
    def _without_exchange(self, model: torch.nn.Module) -> Iterator[None]:
        """As transformers does for all micro-steps of a window but the last."""
        state = self.accelerator.gradient_state
        exchanges = state.sync_gradients
        state._set_sync_gradients(False)
        is_deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        try:
            with nullcontext() if is_deepspeed else self.accelerator.no_sync(model):
                yield
        finally:
            state._set_sync_gradients(exchanges)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> torch.Tensor:
        """This row's share of the step's loss, scaled so that DDP's mean over ranks is the sum."""
        assert self.window is not None, "compute_loss without a prepared window"
        assert not return_outputs, "evaluation goes through rollouts, not through the loss"
        started = time.perf_counter()
        objective, supervision, queries = self._objective_of_step(), inputs["supervision"], inputs["queries"]
        scores = model(forward_fn=objective.forward_fn(inputs["model"], supervision, queries))
        self._record_losses(inputs["row"], supervision, queries, scores)
        result = objective.result(supervision, scores, self.window.totals)
        terms = {name_channel(name, self.window.channel): share for name, share in result.terms.items()}
        self._figures.note(terms, scores, queries)
        self.sums.add({"time/forward_s": time.perf_counter() - started, "train/micro_steps": 1})
        if self._at_last_row and not self._agreed:
            self._agree(None)
        return result.loss * distributed.world_size()

    def _record_losses(
        self,
        row: PackedRow,
        supervision: SupervisionTensors,
        queries: Sequence[HeadQuery],
        scores: Sequence[HeadScores],
    ) -> None:
        """Of samples that are recorded only, which a step in many has: it waits for the device."""
        if self._recorder is not None and len(scores) == 1 and self._recorder.wants_losses(row.segments):
            losses = token_losses(row, supervision, queries[0], scores[0])
            self._recorder.offer_losses(self.state.global_step, row.segments, losses)

    def _look(self) -> None:
        """Take in what the step's rows left on the device, behind the last of them, so that the host runs ahead of the
        device in all micro-steps before. The objective replaces NaN and infinity, so that one broken logit cannot erase
        a step. That must not hide a model that is broken altogether: its loss would look finite for ever."""
        for row in self._figures.look():
            self.sums.add(
                {"train/nonfinite_positions_total": row.nonfinite, "train/clamped_positions_total": row.clamped}
            )
            if row.all_broken:
                raise TrainingDiverged(
                    f"step {self.state.global_step + 1}: every supervised position has NaN or infinite logits; "
                    f"{TrainingDiverged.ADVICE}"
                )
            self.sums.add(row.shares)

    def close(self) -> None:
        """Release the rollout engine, write the records that wait, and leave no row behind."""
        if self._rows is not None:
            self._rows.stop()
        self._eval_backend.close()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the steps' global metrics to the trainer's own line. Every rank logs, so the reduction is collective."""
        if "loss" in logs and self.sums.steps:
            metrics = self.sums.take()
            # The trainer averages the scaled loss over ranks; the sum of the terms is the same number, exactly.
            metrics |= self._watched(metrics)
            logs = {**logs, **MetricsPayload("train", self.state.global_step, metrics).metrics}
        super().log(logs, start_time)

    def _watched(self, metrics: dict[str, float]) -> dict[str, float]:
        """Safeguards of a line with rollouts. What a resumed run logged before counts."""
        if self._drift is None:
            self._drift = DriftWatch()
            self._drift.replay(self.state.log_history)
        return self._drift.observe(metrics, self.state.global_step)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Rollouts on the validation set → ``eval_rollout/*``; ``decode_batch_size`` alone says how many a rollout
        device decodes at once. None, where ``rollout_matching.eval_detection`` is off."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        assert isinstance(dataset, RecordDataset)
        started = time.perf_counter()
        figures: dict[str, float] = {}
        if self._measured is not None:
            where = f"evaluation after step {self.state.global_step}"
            self.begin_step()  # the one before is over: what it changed stays
            if self._ahead is not None:
                self._ahead.finish()  # its answers come from the weights before
            with (
                self.saving_before_giving_up(where),
                distributed.raise_on_all_ranks(where),
                synced(self._eval_backend, self.state.global_step),
            ):
                figures, _ = evaluate_dataset(
                    dataset,
                    self._eval_backend,
                    self._vocab,
                    batch_size=self._eval_backend.batch_size,
                    seed=self.args.seed,
                    options=self._measured,
                    scorer=self._scorer,
                    on_progress=self._end_if_asked,
                )
        metrics = {f"{metric_key_prefix}_rollout/{name}": value for name, value in figures.items()}
        metrics[f"{metric_key_prefix}_time/runtime_s"] = time.perf_counter() - started
        self.log(dict(MetricsPayload("eval", self.state.global_step, metrics).metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _end_if_asked(self, *_: int) -> None:
        """Between two batches of an evaluation, which changes nothing. Alone only: ranks must leave it together."""
        if distributed.world_size() == 1 and (number := self.asked_to_stop()) is not None:
            raise RunStopped("asked to end during an evaluation", number)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not estimated: transformers' formula reads padded ``input_ids``, which a packed row does not have."""
        return 0


def _owning_memory(sample: Sample) -> Sample:
    """Copy what a loader process shares: each such tensor keeps a file open, and segments may wait by the hundred."""
    inputs = {
        name: value.clone() if value.is_shared() else value for name, value in sample.request.model_inputs.items()
    }
    return replace(sample, request=replace(sample.request, model_inputs=inputs))
