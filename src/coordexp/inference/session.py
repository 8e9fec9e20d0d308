"""A checkpoint that answers: options, configuration, class names, and the session that holds model and backend.

Imports torch only to open a session, so that commands can check their options first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from coordexp import distributed
from coordexp.checkpoints.card import read_card, settings_for_answers, training_of
from coordexp.checkpoints.fetch import model_folder
from coordexp.checkpoints.folder import Checkpoint, check_lengths, num_positions
from coordexp.config.base import default_of, parse_dotted
from coordexp.config.from_yaml import parse_section
from coordexp.config.resolved import AnswerConfig, EvaluationConfig
from coordexp.config.schema import TrainingConfig
from coordexp.config.source import Document, apply_arguments
from coordexp.data.class_list import check_known
from coordexp.data.jsonl import clean_desc
from coordexp.errors import ConfigError, DataError
from coordexp.heavy_imports import heavy_imports
from coordexp.hub import name_of
from coordexp.out_of_memory import phase

if TYPE_CHECKING:
    from coordexp.coords import CoordVocab
    from coordexp.data.preparation import ImagePreparation
    from coordexp.modeling.inputs import PromptEncoder
    from coordexp.modeling.scores import TokenScorer
    from coordexp.records import ImageRecord
    from coordexp.rollouts import RolloutBackend

# For checkpoints that no run trained:
_LONGEST = 16384  # tokens of a prompt and its answer
_ANSWER = 2048  # tokens of an answer
_DTYPE = "float32"  # every device supports it, and answers do not depend on rounding

BATCH_SIZE = 8  # images answered at once
SEED: int = default_of(TrainingConfig, "seed")
_MOST_ANSWERS = 1000  # per image
SAMPLING_TEMPERATURE = 0.7  # of further answers, if the configuration decodes greedily
_TEMPERATURE_KEY = "rollout_matching.decoding.temperature"
Backend = Literal["hf", "vllm"]
Settings = TypeVar("Settings", AnswerConfig, EvaluationConfig)


def inference_config(
    model: str | Path,
    arguments: Sequence[str] = (),
    *,
    backend: Backend = "hf",
    batch_size: int | None = None,
    max_new_tokens: int | None = None,
    prompt: str | None = None,
    dtype: str | None = None,
    use_cpu: bool = False,
    seed: int | None = None,
    temperature: float | None = None,
) -> AnswerConfig:
    """A configuration for answers of ``model``, greedy without a ``temperature``. An option that is None has the value
    of the model's own run, as on its card. ``model.model`` is a folder. ``arguments`` (``key.path=value``) override the
    rest. Raises CheckpointError for no such model or no readable card, ConfigError for a value that is refused."""
    folder = model_folder(model)
    Checkpoint.open(folder)
    own = training_of(folder)
    template = settings_for_answers(own)
    if prompt is not None:
        template["prompt"] = prompt
    longest = min(_LONGEST if own is None else own.global_max_length, num_positions(folder) or _LONGEST)
    if max_new_tokens is None:
        max_new_tokens = _ANSWER if own is None else own.max_new_tokens
        if own is None or max_new_tokens >= longest:  # a run's own limit holds where it fits
            max_new_tokens = min(max_new_tokens, max(1, longest // 2))
    elif max_new_tokens >= longest:
        raise ConfigError(
            f"max_new_tokens: {max_new_tokens} leaves no room for the prompt in {longest} tokens; lower it"
        )
    rollout: dict[str, Any] = {
        "rollout_backend": backend,
        "decode_batch_size": BATCH_SIZE if batch_size is None else batch_size,
        "max_new_tokens": max_new_tokens,
        "decoding": {"temperature": temperature or 0.0},
    }
    if own is not None:
        rollout["repeat_terminate"] = dict(own.repeat_terminate)
    data = {
        "model": {"model": str(folder), "dtype": dtype or (_DTYPE if own is None else own.dtype)},
        "template": template,
        "rollout_matching": rollout,
        "global_max_length": longest,
        "use_cpu": use_cpu,
        "seed": SEED if seed is None else seed,
    }
    document = Document(data)
    apply_arguments(document, arguments)
    return _with_engine(parse_section(AnswerConfig, document, str(folder)))


def _with_engine(config: Settings) -> Settings:
    rollout = config.rollout_matching
    if rollout.rollout_backend != "vllm":
        return config
    from coordexp.engine.wire.engine_process import has_gpu

    # One engine per process. Compiling its kernels takes minutes on a CPU, and saves little there.
    engine = {"tensor_parallel_size": 1, "enforce_eager": not has_gpu()}
    engine |= {"max_model_len": config.global_max_length, "dtype": config.model.dtype}
    missing = {name: value for name, value in engine.items() if name not in rollout.vllm.model_fields_set}
    vllm = rollout.vllm.model_copy(update=missing)
    return config.model_copy(update={"rollout_matching": rollout.model_copy(update={"vllm": vllm})})


def evaluation_config(model: Path, data: Path | None, arguments: Sequence[str] = ()) -> EvaluationConfig:
    """A configuration that evaluates ``model`` by its own settings, as :func:`inference_config`, on ``data`` or else on
    the validation data of its run. Figures are written below the model's folder; of a model in the hub's cache, below
    ``outputs``. Raises ConfigError without data."""
    own = read_card(model).training
    jsonl = data or (None if own is None else own.val_jsonl)
    if jsonl is None:
        raise ConfigError(f"{model} has no validation data on its card; name a JSONL with --data")
    answering = inference_config(model).model_dump(mode="json")
    del answering["rollout_matching"]["vllm"]  # all defaults, which must not look like given ones
    kept = {} if own is None else {key: getattr(own, key) for key in ("object_field_order", "object_ordering")}
    document = Document(
        {
            **{key: answering[key] for key in ("model", "template", "rollout_matching", "global_max_length")},
            "custom": {"val_jsonl": str(jsonl), **kept},
            "training": {"output_dir": str(model) if name_of(model) is None else "outputs", "seed": answering["seed"]},
        }
    )
    apply_arguments(document, arguments)
    return _with_engine(parse_section(EvaluationConfig, document, str(model)))


def with_several_answers(config: AnswerConfig, answers: int, arguments: Sequence[str] = ()) -> AnswerConfig:
    """``config`` for ``answers`` answers per image: the first is greedy, and further ones need a temperature, which is
    :data:`SAMPLING_TEMPERATURE` if the configuration has none. Raises ConfigError for fewer than one or more than
    1000, or for further ones with beam search or with a temperature of 0 among ``arguments`` (``key.path=value``)."""
    if not 1 <= answers <= _MOST_ANSWERS:
        raise ConfigError(f"answers: {answers}; give 1 to {_MOST_ANSWERS} per image, which are all held at once")
    rollout = config.rollout_matching
    if answers > 1 and rollout.num_beams > 1:
        raise ConfigError(
            f"answers: {answers}, but rollout_matching.num_beams is {rollout.num_beams} and beam search always finds "
            "the same answer; leave one of them out"
        )
    if answers == 1 or rollout.decoding.temperature > 0:
        return config
    asked = Document()
    apply_arguments(asked, [word for word in arguments if _TEMPERATURE_KEY.startswith(word.partition("=")[0])])
    if parse_dotted(_TEMPERATURE_KEY) in asked.origin:
        raise ConfigError(
            f"{_TEMPERATURE_KEY}: 0 makes all {answers} answers the same; give a temperature above 0, such as "
            f"{SAMPLING_TEMPERATURE:g}, or leave out answers"
        )
    decoding = rollout.decoding.model_copy(update={"temperature": SAMPLING_TEMPERATURE})
    return config.model_copy(update={"rollout_matching": rollout.model_copy(update={"decoding": decoding})})


def read_class_names(given: str | None, model: str | Path) -> tuple[str, ...]:
    """The class names of ``--classes``: names between commas, or those of a file or folder as :func:`class_list_at`,
    whose errors it raises; empty for None. Raises ConfigError as :func:`checked_class_names`, or for no name."""
    if given is None:
        return ()
    path = Path(given)
    if os.path.exists(path):  # False for names that are too long for a file's
        from coordexp.evaluation.users_terms import class_list_at

        return checked_class_names(tuple(class_list_at(path)), model)
    if path.suffix.lower() in (".txt", ".names", ".jsonl", ".yaml", ".yml", ".json", ".csv"):
        raise DataError("not found; --classes takes names between commas, a .txt, .jsonl or data.yaml", path=path)
    return checked_class_names(given.split(","), model)


def checked_class_names(names: Sequence[str], model: str | Path) -> tuple[str, ...]:
    """The names as a dataset would contain them, each once. Raises ConfigError for one that no dataset may contain or
    that is not in the class list of ``model``, or for anything else than a list."""
    if not isinstance(names, Iterable) or isinstance(names, str | bytes | set | frozenset | Mapping):
        raise ConfigError(f"classes is {names!r}; give a list of names")
    try:
        cleaned = tuple(dict.fromkeys(clean_desc(name) for name in names))
    except ValueError as error:
        raise ConfigError(f"a class name is refused: {error}") from error
    if cleaned:
        check_known(cleaned, read_card(model).classes, model)
    return cleaned


def check_device(device: str | None, backend: Backend) -> None:
    """Raise ConfigError for a device that does not exist, or that this machine or the backend cannot use."""
    if device in (None, "cpu"):
        return
    named = re.fullmatch(r"cuda(?::(\d+))?", device)
    if named is None:
        raise ConfigError(f"device: {device!r} is unknown; expected cpu, cuda, cuda:N, or None: a GPU if there is one")
    import torch

    count, index = torch.cuda.device_count() if torch.cuda.is_available() else 0, int(named[1] or 0)
    if not count:
        raise ConfigError(f"device: {device!r}, but torch {torch.__version__} finds no GPU that it can use; use 'cpu'")
    if index >= count:
        raise ConfigError(f"device: {device!r}, but torch finds {count} GPUs; use cuda:0 to cuda:{count - 1}")
    if index and backend == "vllm":
        raise ConfigError(f"device: {device!r}: vLLM uses the first visible GPU; set CUDA_VISIBLE_DEVICES={index}")


_POOR = "answers may be poor. Resize them, or train on data from coordexp data convert: checkpoints contain its rule"


def size_note(records: Sequence[ImageRecord], preparation: ImagePreparation, advice: str = _POOR) -> str | None:
    """A warning about images that are far from the size of the training images; None if there is nothing to say.
    ``advice`` may name ``{most}``, pixels of a training image."""
    unlike = [record for record in records if preparation.is_unlike_training(record.width, record.height)]
    if not unlike or preparation.seen_pixels is None:
        return None
    least, most = preparation.seen_pixels
    first = unlike[0]
    return (
        f"{len(unlike)} of {len(records)} images are far from the size that this model was trained at "
        f"({least:,} to {most:,} pixels), the first is {first.sample_id} ({first.width}x{first.height}); "
        + advice.format(most=most)
    )


@dataclass(frozen=True, slots=True, eq=False)
class InferenceSession:
    """A loaded model with everything that turns images into scored answers. ``classes``: the names in its training
    data, empty if unknown. ``limited_to(class_names)``: a backend for other class names, on the same model."""

    encoder: PromptEncoder
    vocab: CoordVocab
    backend: RolloutBackend
    scorer: TokenScorer
    preparation: ImagePreparation
    classes: tuple[str, ...]
    limited_to: Callable[[tuple[str, ...]], RolloutBackend]


def checked_model(config: AnswerConfig, model: str | Path | None) -> Path:
    """The checkpoint, ``model.model`` for None, checked before its weights are loaded. Raises CheckpointError,
    VocabError or ConfigError if it has no tokenizer of ours, or cannot have such lengths."""
    with heavy_imports():
        from coordexp.modeling.load import load_vocab

    checkpoint = Checkpoint.open(model or config.model.model)
    load_vocab(checkpoint)
    check_lengths(config, checkpoint)
    return checkpoint.path


@contextmanager
def open_session(
    config: AnswerConfig, model: Path, class_names: Sequence[str] = (), device: str | None = None
) -> Iterator[InferenceSession]:
    """Load ``model`` on ``device`` (None: this rank's), start its backend, and close it at the end.
    ``class_names``: those that answers may use; empty for any."""
    with heavy_imports():
        import torch
        from accelerate import PartialState

        from coordexp.checkpoints.memory import advising
        from coordexp.data.images import open_rgb
        from coordexp.modeling.inputs import PromptEncoder
        from coordexp.modeling.load import load_model
        from coordexp.modeling.scores import TokenScorer
        from coordexp.rollouts import build_backend, rollout_session

    distributed.join(use_cpu=config.use_cpu)
    state = PartialState(cpu=config.use_cpu)
    with advising(config), phase("start", "loading the model"):
        loaded = load_model(model, config.model.dtype, config.model.attn_implementation)
        torch.nn.Module.to(loaded.model, state.device if device is None else torch.device(device))
    parts = loaded.parts(open_image=lambda path: loaded.preparation(open_rgb(path)), preparation=loaded.preparation)
    # The adapters of a run are merged, so an engine gets full weights, whatever the run itself pushes.
    vllm = config.rollout_matching.vllm
    merged = {"enable_lora": False, "sync": vllm.sync.model_copy(update={"mode": "full"})}
    rollout = config.rollout_matching.model_copy(update={"vllm": vllm.model_copy(update=merged)})
    with advising(config), phase("engine", "the start of the engine"):
        backend = build_backend(rollout, parts, class_names)
    try:
        with advising(config), phase("rollouts", "answering"), rollout_session(backend, 0):
            template = config.template
            encoder = PromptEncoder(loaded.processor, template.prompt, template.system, loaded.preparation)
            scorer = TokenScorer(loaded.model, loaded.vocab, loaded.image_token_id, loaded.card.calibration)

            def limited_to(names: tuple[str, ...]) -> RolloutBackend:
                if names == tuple(class_names):
                    return backend
                if rollout.rollout_backend != "hf":
                    raise ConfigError('classes: an engine is started for one list; name it at the start, or use "hf"')
                return build_backend(rollout, parts, names)  # nothing to load or to close

            yield InferenceSession(
                encoder, loaded.vocab, backend, scorer, loaded.preparation, loaded.card.classes, limited_to
            )
    finally:
        backend.close()
