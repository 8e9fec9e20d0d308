"""``coordexp replay``: targets and losses again from rollout records, without any rollout engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from coordexp.config import RunConfig
from coordexp.errors import ConfigError, DataError
from coordexp.recording.rollout_record import RolloutRecord, prompt_sha256, read_records, rebuild, replay
from coordexp.records import ImageRecord, Segment


@dataclass(frozen=True, slots=True)
class Replayed:
    """One record. ``differences``: fields that are computed differently now. ``losses``: the objective's terms of this
    sample alone and their sum as ``loss``; None without a model."""

    record: RolloutRecord
    differences: tuple[str, ...]
    losses: dict[str, float] | None


def replay_records(
    source: Path, config: RunConfig, *, model: Path | None = None, limit: int | None = None
) -> Iterator[Replayed]:
    """Build every target of ``source`` (a file or folder of records) again, and compare it with the record. ``model``:
    checkpoint for the losses; None computes none, and reads the tokenizer of ``model.model``. Raises DataError,
    CheckpointError or VocabError if records, images or tokenizer are not those of the run of ``config``."""
    from coordexp.modeling.load import load_vocab

    records = read_records(source)[:limit]
    vocab = load_vocab(model or config.model.model)
    if model is None:
        for record in records:
            yield Replayed(record, replay(record, vocab), None)
        return

    import torch

    from coordexp.modeling.inputs import PromptEncoder
    from coordexp.modeling.load import load_model
    from coordexp.objective import RowObjective, build_pipeline
    from coordexp.packing import build_row
    from coordexp.targets import count_terms
    from coordexp.training.rows import RowBuilder
    from coordexp.training.tasks import rollout_pipeline

    loaded = load_model(model, config.model.dtype, config.model.attn_implementation)
    loaded.model.eval()
    encoder = PromptEncoder(loaded.processor, config.template.prompt, config.template.system)
    objective = RowObjective(build_pipeline(rollout_pipeline(config)), loaded.vocab.coord_token_ids)
    build_row_tensors = RowBuilder.from_model(loaded, torch.device("cpu"))
    for record in records:
        image = ImageRecord(record.sample_id, Path(record.image), record.width, record.height, record.ground_truth)
        request = encoder.encode(image)
        if prompt_sha256(request.prompt_token_ids) != record.prompt.sha256:
            raise DataError(
                f"{record.sample_id}: its prompt is no longer the recorded one; replay with the run's data, template "
                "and processor"
            )
        target = rebuild(record, loaded.vocab)[2]  # in a packed row of its own
        row = build_row([Segment(record.sample_id, request.prompt_token_ids, target, request.model_inputs)])
        tensors = build_row_tensors(row, objective)
        with torch.no_grad():
            scores = loaded.model(forward_fn=partial(objective.scores, row=tensors))
            result = objective.result(tensors.supervision, scores, count_terms([target]))
        losses = {"loss": result.loss.item(), **{name: share.item() for name, share in result.terms.items()}}
        yield Replayed(record, replay(record, vocab), losses)


# Sections and keys of the configuration that a replay reads, and those that it reads for losses.
_READ = ("model",)
_READ_FOR_LOSSES = (
    "template",
    "rollout_matching.pipeline",
    "stage2_ab.pipeline",
)


def check_keys(words: Sequence[str], *, with_losses: bool) -> None:
    """Raises ConfigError for ``key=value`` that :func:`replay_records` does not read; ``with_losses``: with a model."""
    read = _READ + _READ_FOR_LOSSES * with_losses
    for key in (word.partition("=")[0] for word in words):
        if not any(f"{key}.".startswith(f"{one}.") for one in read):
            raise ConfigError(
                f"{key} has no use here: a record is matched, and its target built, by its own settings; replay reads "
                f"{', '.join(_READ)} and, with --model, {', '.join(_READ_FOR_LOSSES)}"
            )


def config_beside(source: Path) -> Path:
    """The resolved configuration of the run that these records belong to. Raises ConfigError if there is none."""
    start = source.resolve()
    for folder in (start, *start.parents):
        if (folder / "resolved_config.yaml").is_file():
            return folder / "resolved_config.yaml"
    raise ConfigError(f"{source}: no resolved_config.yaml in its folder or above; name the run's YAML before it")
