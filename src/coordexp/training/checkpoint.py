"""Which checkpoints are whole, which one a run goes on from, and which are kept.

All ranks write a checkpoint together, over seconds or minutes, and a kill may come between any two of its files. It
counts from the moment at which it is sealed: the seal is its last file, is written once every rank has written its own,
and lists them all with their sizes.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from coordexp import distributed
from coordexp.errors import CheckpointError
from coordexp.training.buffer_file import holds_carry_buffers
from coordexp.training.line_files import write_atomically

logger = logging.getLogger("coordexp")

SEAL = "complete.json"


@dataclass(frozen=True, slots=True)
class Seal:
    """What a whole checkpoint says about itself. ``files``: sizes in bytes by path; ``resumable``: false for the model
    alone."""

    step: int
    world_size: int
    resumable: bool
    files: Mapping[str, int]


def checkpoint_folder(output_dir: str | Path, step: int) -> Path:
    return Path(output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"


def seal_checkpoint(folder: Path, step: int, *, resumable: bool, writes: bool, shared: bool) -> None:
    """Declare a checkpoint finished, once every rank is here. A collective call.

    Args:
        writes: whether this rank writes the seal. shared: all ranks write to one file system; otherwise each that seals
            sees the files of its own machine alone.
    """
    where = f"sealing {folder}"
    with distributed.together(where):
        seen = _sizes(folder)
    if shared:
        # A network file system may show a rank the others' files late, but its own at once.
        for part in distributed.gather_json(seen):
            seen |= {name: max(size, seen.get(name, 0)) for name, size in part.items()}
    with distributed.together(where):
        if writes:
            seal = Seal(step, distributed.world_size(), resumable, seen)
            write_atomically(folder / SEAL, json.dumps(asdict(seal), indent=1, sort_keys=True) + "\n")


def read_seal(folder: Path) -> Seal:
    """The seal of a whole checkpoint.

    Raises:
        CheckpointError: the folder holds none, or not all that its seal lists. The text goes on after a path.
    """
    if not folder.is_dir():
        raise CheckpointError("is no folder")
    try:
        seal = Seal(**json.loads((folder / SEAL).read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise CheckpointError(f"is unfinished: it has no {SEAL}, the last file of a checkpoint") from error
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"has an unreadable {SEAL} ({error})") from error
    sizes = _sizes(folder)
    wrong = sorted(name for name, size in seal.files.items() if sizes.get(name) != size)
    if wrong:
        state = "is missing" if wrong[0] not in sizes else f"has {sizes[wrong[0]]} bytes of {seal.files[wrong[0]]}"
        others = f", and {len(wrong) - 1} more files are not as they were" if len(wrong) > 1 else ""
        raise CheckpointError(f"is damaged: {wrong[0]} {state}{others}")
    return seal


def is_complete(folder: Path) -> bool:
    """Whether everything that all ranks had to write is there."""
    try:
        read_seal(folder)
    except CheckpointError:
        return False
    return True


def resolve_resume(output_dir: str | Path, resume: bool | str | None) -> Path | None:
    """The checkpoint that ``training.resume_from_checkpoint`` means; None to start anew. A collective call: all ranks
    go on from the same one.

    ``True`` takes the newest that is whole for every rank, and passes over others by name. Where none was ever finished
    it starts anew, so that one YAML serves the first start and every restart. A named folder must be whole.

    Raises:
        CheckpointError: the named folder is none, unfinished or damaged, or holds a model alone; or all that were
            finished are so by now.
    """
    if not resume:
        return None
    if resume is True:
        return _newest_whole(Path(output_dir))
    with distributed.together("training.resume_from_checkpoint"):
        if problem := _problem_with(Path(resume)):
            whole = [folder for folder in _checkpoints(Path(resume).parent) if _problem_with(folder) is None]
            cure = f"name {whole[0]}, which is whole" if whole else "name a checkpoint-N folder that is whole"
            raise CheckpointError(f"training.resume_from_checkpoint: {resume} {problem}; {cure}, or start anew")
    return Path(resume)


def check_resume(checkpoint: Path, packing: bool) -> None:
    """Refuse to resume where segments that wait in ``checkpoint`` would never be trained on; warn where the data would
    come in another order.

    Raises:
        CheckpointError: packing is off now, or another number of processes wrote the checkpoint.
    """
    written, now = read_seal(checkpoint).world_size, distributed.world_size()
    buffered = holds_carry_buffers(checkpoint)
    if not packing and buffered:
        raise CheckpointError(
            f"{checkpoint}: holds segments that wait for a packed row, but training.packing is false; resume with "
            "training.packing: true, or start anew"
        )
    if packing and not buffered:
        raise CheckpointError(
            f"{checkpoint}: carry buffer missing: it was written with training.packing: false; resume with that, or "
            "start anew"
        )
    if written == now:
        return
    if packing:
        raise CheckpointError(
            f"{checkpoint}: written by {written} processes, resumed by {now}: each process has segments of its own "
            f"waiting for a packed row. Resume with {written} processes, or start anew"
        )
    if distributed.is_main():
        logger.warning(
            "%s was written by %d processes and is resumed by %d: samples come in another order, random states and "
            "the log line under way start anew",
            checkpoint,
            written,
            now,
        )


def warn_of_checkpoints_ahead(output_dir: str | Path, start: int) -> None:
    """Say which checkpoints of an earlier run could be taken for this one's, which starts after ``start`` steps."""
    ahead = [folder.name for folder in _checkpoints(Path(output_dir)) if _step_of(folder) > start]
    if ahead and distributed.is_main():
        logger.warning(
            "%s holds %s of an earlier run, ahead of step %d where this one starts; training.resume_from_checkpoint: "
            "true would take the newest. Move them away, or choose another training.output_dir",
            output_dir,
            ", ".join(ahead),
            start,
        )


def delete_old(output_dir: Path, limit: int | None, *, newest: Path, best: Path | None) -> None:
    """Keep ``newest``, which must be whole by now, and ``best``; fill up to ``limit`` with the newest other whole ones.

    Everything older goes, unfinished ones too. What cannot be deleted is warned of.
    """
    if limit is None:
        return
    kept = {newest} if best is None else {newest, best}
    for folder in _checkpoints(output_dir):
        if folder in kept:
            continue
        whole = is_complete(folder)
        if whole and len(kept) < limit:
            kept.add(folder)
        elif whole or _step_of(folder) < _step_of(newest):
            try:
                shutil.rmtree(folder)
            except OSError as error:
                logger.warning("%s: cannot be deleted as training.save_total_limit wants it: %s", folder, error)


def _newest_whole(output_dir: Path) -> Path | None:
    with distributed.together(f"looking for checkpoints in {output_dir}"):
        mine = {folder.name: [_problem_with(folder), (folder / SEAL).exists()] for folder in _checkpoints(output_dir)}
    reports = distributed.gather_json(mine)
    absent = ["is not there; all processes must see the same training.output_dir", False]
    finished: list[str] = []
    for name in sorted(set().union(*reports), key=lambda name: -_step_of(Path(name))):
        seen = [report.get(name, absent) for report in reports]
        rank, problem = next(((rank, problem) for rank, (problem, _) in enumerate(seen) if problem), (0, None))
        if problem is None:
            return output_dir / name
        by = f" (seen by rank {rank})" if len(reports) > 1 else ""
        if distributed.is_main():
            logger.warning("%s %s; passing over it%s", output_dir / name, problem, by)
        if any(sealed for _, sealed in seen):
            finished.append(f"{name} {problem}{by}")
    if finished:
        raise CheckpointError(
            f"training.resume_from_checkpoint: true found no checkpoint to go on from in {output_dir}, and starting "
            f"anew would give up what was learned there: {'; '.join(finished)}. Mend or remove it, or choose another "
            "training.output_dir"
        )
    return None


def _problem_with(folder: Path) -> str | None:
    """Why training cannot go on from ``folder``, to be read after its name; None where it can."""
    try:
        seal = read_seal(folder)
    except CheckpointError as error:
        return str(error)
    return None if seal.resumable else "holds the model alone (training.save_only_model: true)"


def _checkpoints(output_dir: Path) -> list[Path]:
    """Checkpoint folders, of the most steps first."""
    found = [folder for folder in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
             if folder.is_dir() and re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-\d+", folder.name)]  # fmt: skip
    return sorted(found, key=_step_of, reverse=True)


def _step_of(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def _sizes(folder: Path) -> dict[str, int]:
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and path.name != SEAL
    }
