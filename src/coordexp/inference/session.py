"""A checkpoint that answers: model, prompt encoder and rollout backend, opened together and closed together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from coordexp.checkpoints.folder import Checkpoint
from coordexp.checkpoints.lengths import check_lengths
from coordexp.config.schema import AnswerConfig
from coordexp.data.images import open_rgb
from coordexp.modeling.inputs import PromptEncoder
from coordexp.modeling.load import LoadedModel, load_model, load_vocab
from coordexp.modeling.scores import TokenScorer
from coordexp.modeling.weights import LearnerWeights
from coordexp.rollouts import RolloutBackend, build_backend, rollout_session
from coordexp.rollouts.learner import LearnerParts


@dataclass(frozen=True, slots=True, eq=False)
class InferenceSession:
    """What turns images into answers. ``scorer`` says how sure the model was."""

    loaded: LoadedModel
    encoder: PromptEncoder
    backend: RolloutBackend
    scorer: TokenScorer


def checked_model(config: AnswerConfig, model: str | Path | None) -> Path:
    """The checkpoint that is asked, ``model.model`` for None, before its weights are loaded.

    Raises:
        CheckpointError, VocabError, ConfigError: no tokenizer of ours in it, or lengths that it cannot have.
    """
    checkpoint = Checkpoint.open(model or config.model.model)
    load_vocab(checkpoint)
    check_lengths(config, checkpoint)
    return checkpoint.path


@contextmanager
def open_session(config: AnswerConfig, model: Path, classes: Sequence[str] = ()) -> Iterator[InferenceSession]:
    """Load ``model`` on this rank's device, start its backend, and close it at the end.

    ``classes``: the only descriptions that answers may contain; empty for any.

    Raises:
        CheckpointError, VocabError, RolloutError.
    """
    from accelerate import PartialState

    state = PartialState(cpu=config.use_cpu)  # joins the process group under torchrun
    loaded = load_model(model, config.model.dtype, config.model.attn_implementation)
    torch.nn.Module.to(loaded.model, state.device)
    parts = LearnerParts(
        model=loaded.model,
        vocab=loaded.vocab,
        image_token_id=loaded.image_token_id,
        weights=LearnerWeights(loaded.model),
        checkpoint=loaded.checkpoint.base,
        open_image=lambda path: loaded.preparation(open_rgb(path)),
        preparation=loaded.preparation,
    )
    backend = build_backend(config.rollout_matching, parts, classes)
    try:
        with rollout_session(backend, 0):
            template = config.template
            encoder = PromptEncoder(loaded.processor, template.prompt, template.system, loaded.preparation)
            yield InferenceSession(
                loaded, encoder, backend, TokenScorer(loaded.model, loaded.vocab, loaded.image_token_id)
            )
    finally:
        backend.close()
