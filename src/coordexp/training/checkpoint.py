"""Which checkpoints are whole, which one a run goes on from, which are kept; and the errors of those that cannot be
read or written."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError

from safetensors import SafetensorError
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from coordexp import distributed
from coordexp.errors import CheckpointError
from coordexp.training.pending_state import holds_carry_buffers
from coordexp.training.seal import SEAL, check_contents, read_seal

logger = logging.getLogger("coordexp")


def checkpoint_folder(output_dir: str | Path, step: int) -> Path:
    """Where the checkpoint of ``step`` lies, by transformers' own name."""
    return Path(output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"


def is_complete(folder: Path) -> bool:
    """Whether everything that all ranks had to write is there, in its size."""
    try:
        read_seal(folder)
    except CheckpointError:
        return False
    return True


def resolve_resume(output_dir: str | Path, resume: bool | str | None) -> Path | None:
    """The checkpoint that ``training.resume_from_checkpoint`` means; None to start anew. A collective call: all ranks
    go on from the same one.

    ``True`` takes the newest that is whole for every rank, and passes over others by name. Where none was ever finished
    it starts anew, so that one YAML serves the first start and every restart. A named folder must be whole. What is in
    the files is compared with their seal: the ranks of each machine read them all, each its share.

    Raises:
        CheckpointError: the named folder is none, unfinished or damaged, or holds a model alone; or all that were
            finished are so by now.
    """
    if not resume:
        return None
    if resume is True:
        return _newest_whole(Path(output_dir))
    with distributed.raise_on_all_ranks("training.resume_from_checkpoint"):
        if problem := _problem_with(Path(resume)) or _damage_in(Path(resume), *_share()):
            older = (folder for folder in _checkpoints(Path(resume).parent) if folder != Path(resume))
            whole = next((one for one in older if _problem_with(one) is None and _damage_in(one) is None), None)
            cure = "name a checkpoint-N folder that is whole" if whole is None else f"name {whole}, which is whole"
            raise CheckpointError(f"training.resume_from_checkpoint: {resume} {problem}; {cure}, or start anew")
        _warn_of_no_checksums(Path(resume))
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


@contextmanager
def readable(checkpoint: Path, *files: str) -> Iterator[None]:
    """Reads ``files`` of a checkpoint.

    Raises:
        CheckpointError: in place of whatever a library says of a file whose seal fits and which is none.
    """
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, EOFError, MemoryError,
            UnpicklingError, SafetensorError) as error:  # fmt: skip
        raise CheckpointError(
            f"{checkpoint}: {' or '.join(files)} cannot be read ({type(error).__name__}: {str(error).strip()[:200]}); "
            "resume from an older checkpoint, or start anew"
        ) from error


def warn_of_checkpoints_ahead(output_dir: str | Path, start: int, resume: bool | str | None) -> None:
    """Say which whole checkpoints of an earlier run could be taken for this one's, which starts after ``start`` steps.

    With ``resume`` True there is nothing to say: the newest whole one was taken, and each passed over was named.
    """
    if resume is True or not distributed.is_main():
        return
    folders = [folder for folder in _checkpoints(Path(output_dir)) if _step_of(folder) > start]
    ahead = [folder.name for folder in folders if _problem_with(folder) is None]
    if ahead:
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
    with distributed.raise_on_all_ranks(f"looking for checkpoints in {output_dir}"):
        mine = {folder.name: [_problem_with(folder), (folder / SEAL).exists()] for folder in _checkpoints(output_dir)}
    reports = distributed.gather_json(mine)
    absent = ["is not there; all processes must see the same training.output_dir", False]
    finished: list[str] = []
    for name in sorted(set().union(*reports), key=lambda name: -_step_of(Path(name))):
        seen = [report.get(name, absent) for report in reports]
        if all(problem is None for problem, _ in seen):
            with distributed.raise_on_all_ranks(f"reading {output_dir / name}"):
                damage = _damage_in(output_dir / name, *_share())
            seen = [(problem, True) for problem in distributed.gather_json(damage)]
        rank, problem = next(((rank, problem) for rank, (problem, _) in enumerate(seen) if problem), (0, None))
        if problem is None:
            _warn_of_no_checksums(output_dir / name)
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


def _damage_in(folder: Path, part: int = 0, parts: int = 1) -> str | None:
    """How files of ``folder`` differ from what was sealed, to be read after its name."""
    try:
        check_contents(folder, part, parts)
    except CheckpointError as error:
        return str(error)
    return None


def _share() -> tuple[int, int]:
    """This process's part of the reading that the ranks of its machine do together."""
    return int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _warn_of_no_checksums(folder: Path) -> None:
    if distributed.is_main() and not read_seal(folder).has_checksums:
        logger.warning("%s was sealed without checksums, by an older version: only its sizes were compared", folder)


def _checkpoints(output_dir: Path) -> list[Path]:
    """Checkpoint folders, of the most steps first."""
    folders = [folder for folder in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
             if folder.is_dir() and re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-\d+", folder.name)]  # fmt: skip
    return sorted(folders, key=_step_of, reverse=True)


def _step_of(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What torch's writer says of a short write, and safetensors of the system's error.
_SAID_OF_FULL = re.compile(
    r"unexpected pos \d+|file write failed|PytorchStreamWriter|No space left|os error (28|122|27)\b"
)


@contextmanager
def writing(folder: Path, needed_bytes: int, kept: str) -> Iterator[None]:
    """Writes a checkpoint to ``folder``. ``needed_bytes``: about what it takes; ``kept``: a sentence on what is saved.

    Raises:
        CheckpointError: in place of whatever a library says of a disk that took no more.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        full = isinstance(error, OSError) and error.errno in _FULL
        if not full and not _SAID_OF_FULL.search(str(error)):
            if not isinstance(error, OSError):
                raise
            raise CheckpointError(f"{folder} cannot be written ({error}). {kept}") from error
        raise CheckpointError(
            f"{folder} cannot be written: its disk is full ({_room(folder)}; a checkpoint takes about "
            f"{_mb(needed_bytes)}). {kept}. Make room, or lower training.save_total_limit"
        ) from error


def _room(folder: Path) -> str:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    usage = shutil.disk_usage(there)
    return f"{_mb(usage.free)} of {_mb(usage.total)} free"


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
