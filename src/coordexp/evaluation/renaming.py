"""Other names for predictions before they are evaluated: aliases, and the nearest category of a text encoder.

Torch-free without an encoder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordexp.data.class_list import as_written
from coordexp.errors import CheckpointError, DataError, require
from coordexp.evaluation.answers import ImageAnswer, each_changed
from coordexp.reading import read_yaml

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


_SETTINGS: tuple[str, ...] = ("aliases", "embedder", "embedding_threshold")


@dataclass(frozen=True, slots=True)
class Renaming:
    """Renames predictions by aliases (``class_of``), then those that are still annotated nowhere by a text encoder, if
    the cosine is at least ``threshold``. ``about`` names both files, or None."""

    class_of: Mapping[str, str] | None = None
    encoder: SentenceTransformer | None = None
    threshold: float = 0.0
    about: Mapping[str, object] = field(default_factory=lambda: dict.fromkeys(_SETTINGS))

    @classmethod
    def from_files(cls, aliases: Path | None, embedder: Path | None, threshold: float) -> Renaming:
        """Raises as :func:`read_aliases` and :func:`load_encoder`."""
        named = (aliases and str(aliases), embedder and str(embedder), embedder and threshold)
        about: dict[str, object] = dict(zip(_SETTINGS, named, strict=True))
        class_of = None if aliases is None else read_aliases(aliases)
        return cls(class_of, None if embedder is None else load_encoder(embedder), threshold, about)

    def __call__(self, answers: Sequence[ImageAnswer], annotated: Collection[str] = ()) -> list[ImageAnswer]:
        """``annotated``: the annotated descriptions, if the answers are of tiles, which have no annotations."""
        answers = list(answers)
        if self.class_of is not None:
            class_of = self.class_of
            answers = each_changed(answers, lambda obj: replace(obj, desc=class_of.get(_key(obj.desc), obj.desc)))
        if self.encoder is not None:
            categories = sorted(annotated or {obj.desc for answer in answers for obj in answer.truth})
            unknown = sorted({obj.desc for answer in answers for obj in answer.pred}.difference(categories))
            name_of = nearest_categories(unknown, categories, self.encoder, self.threshold)
            answers = each_changed(answers, lambda obj: replace(obj, desc=name_of.get(obj.desc, obj.desc)))
        return answers

    def note(
        self, before: Sequence[ImageAnswer], after: Sequence[ImageAnswer], calibrated: bool = False, most: int = 8
    ) -> tuple[str, ...]:
        """One line that counts old and new names; none without aliases and encoder. ``calibrated``: confidences were
        fitted to the new names."""
        if self.class_of is None and self.encoder is None:
            return ()
        renamed = Counter(
            (old.desc, new.desc)
            for one, other in zip(before, after, strict=True)
            for old, new in zip(one.pred, other.pred, strict=True)
            if old.desc != new.desc
        )
        shown = ", ".join(f"{old!r} → {new!r} ({count})" for (old, new), count in renamed.most_common(most))
        more = f" and {len(renamed) - most} other names" if len(renamed) > most else ""
        fitted = "; the calibration counts them by their new names, and predict keeps the old ones"
        note = f"{renamed.total()} predictions were renamed{': ' if shown else ''}{shown}{more}"
        return (note + (fitted if calibrated and renamed else ""),)


def _key(text: str) -> str:
    return as_written(text).casefold()


def read_aliases(path: str | Path) -> dict[str, str]:
    """A YAML or JSON file of the form ``class: [alias, …]`` → alias to class, as datasets contain it; case, surrounding
    space and Unicode form of an alias do not matter. Raises DataError for another form, or an alias of two classes."""
    path = Path(path)
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise DataError("expected a mapping of the form 'car: [automobile, sedan]'", path=path)
    class_of: dict[str, str] = {}
    for name, aliases in content.items():
        if not isinstance(name, str) or not isinstance(aliases, list) or any(not isinstance(a, str) for a in aliases):
            raise DataError(f"{name!r}: expected a list of texts, e.g. 'car: [automobile, sedan]'", path=path)
        name = as_written(name)
        for alias in (name, *aliases):
            if class_of.setdefault(_key(alias), name) != name:
                raise DataError(f"{alias!r} is an alias of both {class_of[_key(alias)]!r} and {name!r}", path=path)
    return class_of


def load_encoder(folder: str | Path) -> SentenceTransformer:
    """A text encoder from disk, on the CPU; nothing is downloaded. Mean pooling if the folder names no other. Raises
    CheckpointError for no encoder there, MissingDependency without sentence-transformers."""
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
    """The category of highest cosine for each of ``descs``, if >= ``threshold``; ties go to the first category."""
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
