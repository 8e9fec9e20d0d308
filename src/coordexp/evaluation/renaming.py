"""Other descriptions for predictions: by a table of aliases, then by the nearest annotated meaning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordexp.errors import CheckpointError, DataError, require
from coordexp.evaluation.answers import ImageAnswer

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


@dataclass(frozen=True, slots=True)
class Renaming:
    """Steps that give predictions other descriptions, in order; ``about`` names their sources."""

    steps: tuple[Callable[[Sequence[ImageAnswer]], list[ImageAnswer]], ...] = ()
    about: Mapping[str, object] | None = None

    @classmethod
    def from_files(cls, aliases: Path | None, embedder: Path | None, threshold: float) -> Renaming:
        """Aliases first; then the text encoder, for predictions that are still annotated nowhere.

        Raises:
            DataError, CheckpointError, MissingDependency: as :func:`read_aliases` and :func:`load_encoder`.
        """
        steps, about = [], {}
        if aliases is not None:
            steps.append(partial(apply_aliases, class_of=read_aliases(aliases)))
            about["aliases"] = str(aliases)
        if embedder is not None:
            steps.append(partial(apply_embedding, encoder=load_encoder(embedder), threshold=threshold))
            about |= {"embedder": str(embedder), "embedding_threshold": threshold}
        return cls(tuple(steps), about)

    def __call__(self, answers: Sequence[ImageAnswer]) -> list[ImageAnswer]:
        return reduce(lambda renamed, step: step(renamed), self.steps, list(answers))

    def note(self, before: Sequence[ImageAnswer], after: Sequence[ImageAnswer], most: int = 8) -> tuple[str, ...]:
        """One line that counts what was renamed to what; none without steps."""
        if not self.steps:
            return ()
        renamed = Counter(
            (old.desc, new.desc)
            for one, other in zip(before, after, strict=True)
            for old, new in zip(one.pred, other.pred, strict=True)
            if old.desc != new.desc
        )
        shown = ", ".join(f"{old!r} → {new!r} ({count})" for (old, new), count in renamed.most_common(most))
        more = f" and {len(renamed) - most} other names" if len(renamed) > most else ""
        return (f"{renamed.total()} predictions were renamed{': ' if shown else ''}{shown}{more}",)


NO_RENAMING = Renaming()


def read_aliases(path: str | Path) -> dict[str, str]:
    """A YAML or JSON file of the form ``class: [alias, …]`` → alias to class.

    Raises:
        DataError: another form, or an alias of two classes.
    """
    import yaml

    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"cannot be read: {error}", path=path) from error
    if not isinstance(content, dict):
        raise DataError("expected a mapping of the form 'car: [automobile, sedan]'", path=path)
    class_of: dict[str, str] = {}
    for name, aliases in content.items():
        for alias in _aliases(name, aliases, path):
            if class_of.setdefault(_key(alias), name) != name:
                raise DataError(f"{alias!r} is an alias of both {class_of[_key(alias)]!r} and {name!r}", path=path)
    return class_of


def _aliases(name: Any, aliases: Any, path: Path) -> list[str]:
    if not isinstance(name, str) or not isinstance(aliases, list) or any(not isinstance(a, str) for a in aliases):
        raise DataError(f"{name!r}: expected a list of texts, e.g. 'car: [automobile, sedan]'", path=path)
    return [name, *aliases]


def apply_aliases(answers: Sequence[ImageAnswer], class_of: Mapping[str, str]) -> list[ImageAnswer]:
    """The same answers, predictions renamed; case and surrounding space of an alias do not matter."""
    return _renamed(answers, lambda desc: class_of.get(_key(desc), desc))


def _key(text: str) -> str:
    return text.strip().casefold()


def load_encoder(folder: str | Path) -> SentenceTransformer:
    """A text encoder from disk, on the CPU; nothing is downloaded. Mean pooling if the folder names no other.

    Raises:
        CheckpointError: no such folder, or no encoder in it. MissingDependency: sentence-transformers is not installed.
    """
    if not Path(folder).is_dir():
        raise CheckpointError(f"{folder}: no such folder; --embedder must be a text encoder on disk")
    sentence_transformers: Any = require("sentence_transformers", "--embedder")
    try:
        return sentence_transformers.SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError) as error:
        raise CheckpointError(f"{folder}: not a text encoder that sentence-transformers can load: {error}") from error


def nearest_categories(
    descs: Sequence[str], categories: Sequence[str], encoder: SentenceTransformer, threshold: float
) -> dict[str, str]:
    """The category of highest cosine for each of ``descs`` for which it is at least ``threshold``; ties go to the first
    category."""
    if not descs or not categories:
        return {}
    rows = encoder.encode([*descs, *categories], normalize_embeddings=True, show_progress_bar=False)
    cosine_NC = rows[: len(descs)] @ rows[len(descs) :].T
    best_N = cosine_NC.argmax(axis=1)
    return {
        desc: categories[int(best)]
        for desc, best, row_C in zip(descs, best_N.tolist(), cosine_NC, strict=True)
        if row_C[best] >= threshold
    }


def apply_embedding(
    answers: Sequence[ImageAnswer], encoder: SentenceTransformer, threshold: float
) -> list[ImageAnswer]:
    """The same answers; predictions whose description is annotated nowhere are renamed to the nearest one that is."""
    categories = sorted({obj.desc for answer in answers for obj in answer.truth})
    unknown = sorted({obj.desc for answer in answers for obj in answer.pred}.difference(categories))
    name_of = nearest_categories(unknown, categories, encoder, threshold)
    return _renamed(answers, lambda desc: name_of.get(desc, desc))


def _renamed(answers: Sequence[ImageAnswer], rename: Callable[[str], str]) -> list[ImageAnswer]:
    return [
        replace(answer, pred=tuple(replace(obj, desc=rename(obj.desc)) for obj in answer.pred)) for answer in answers
    ]
