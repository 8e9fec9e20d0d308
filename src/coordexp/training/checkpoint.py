"""Which checkpoints are complete, which one a run resumes from, which are kept; and errors of reading and writing them.

All ranks write a checkpoint together, over seconds or minutes, and a kill or a power loss may come between any two of
its files. It counts once it is sealed: ``complete.json``, its last file, lists all others that a resume reads, with
their sizes and checksums, after every rank has written its files and the disk holds them.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError

from coordexp import distributed
from coordexp.checkpoints.card import CARD
from coordexp.checkpoints.run_folder import CHECKPOINT, SEAL, checkpoints_in, settings_of_run
from coordexp.config.schema import TrainingConfig
from coordexp.data.files import checksums, flush_file, write_atomically
from coordexp.errors import DISK_FULL, CheckpointError, CoordExpError, DataError
from coordexp.out_of_memory import is_out_of_memory
from coordexp.records import from_json
from coordexp.training.parallel import lost_each_other

logger = logging.getLogger("coordexp")

# No resume reads the card, and `coordexp evaluate --calibrate` writes it again.
_UNSEALED = (SEAL, CARD)
_OF_A_STEP = ("per_device_train_batch_size", "gradient_accumulation_steps", "effective_batch_size")
_WRITTEN_BY = re.compile(r"(?:rank|rng_state_|__)(\d+)(?:_\d+)?\.\w+$")


@dataclass(frozen=True, slots=True)
class SealedFile:
    """``crc32``: of each 64 MiB."""

    bytes: int
    crc32: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Seal:
    """The contents of ``complete.json``. ``files``: by path; ``resumable``: false for the model alone."""

    step: int
    world_size: int
    resumable: bool
    files: Mapping[str, SealedFile]


def seal_checkpoint(folder: Path, step: int, *, resumable: bool, writes: bool) -> None:
    """Mark a checkpoint as complete, after all ranks have written their files and the files are on disk. A collective
    call. ``writes``: this rank writes the seal."""
    where = f"sealing {folder}"
    with distributed.raise_on_all_ranks(where):
        sizes = _sizes(folder)
    # On a network file system a rank may see the files of other ranks late.
    gathered = distributed.gather_json([sizes, distributed.on_this_machine()[1]])
    seen, (_, local) = [part for part, _ in gathered], gathered[0]
    sizes = {name: max(part.get(name, 0) for part in seen) for part in seen for name in part}

    def near(name: str) -> Sequence[int]:
        # The page cache of the machine that wrote a file still has it; another would fetch it over the network.
        # That is the machine of the rank in the file's name, or of the first one, with `local` ranks.
        whole = [rank for rank, part in enumerate(seen) if part.get(name) == sizes[name]]
        named = _WRITTEN_BY.search(name)
        own = [rank for rank in whole if named is not None and rank == int(named[1])]
        return own or [rank for rank in whole if rank < local] or whole

    mine = _share_of(distributed.rank(), sizes, near)
    with distributed.raise_on_all_ranks(where):
        sums = dict(zip(mine, checksums([folder / name for name in mine], flush=True), strict=True))
    for part in distributed.gather_json(sums):
        sums |= part
    with distributed.raise_on_all_ranks(where):
        if writes:
            # Flush folders too: a file whose directory entry is not on disk is lost in a power loss.
            for one in [*(path for path in folder.rglob("*") if path.is_dir()), folder, folder.parent]:
                flush_file(one)
            files = {name: SealedFile(size, tuple(sums[name])) for name, size in sizes.items()}
            seal = Seal(step, distributed.world_size(), resumable, files)
            write_atomically(folder / SEAL, json.dumps(asdict(seal), indent=1, sort_keys=True) + "\n")


def read_seal(folder: Path) -> Seal:
    """The seal of a checkpoint whose files all exist, in their sizes; contents are not checked. Raises CheckpointError,
    whose text is written to follow a path, if the seal or a listed file is missing."""
    if not folder.is_dir():
        raise CheckpointError("is not a folder")
    try:
        seal = from_json(Seal, (folder / SEAL).read_bytes(), "a seal")
    except FileNotFoundError as error:
        raise CheckpointError(f"is unfinished: it has no {SEAL}, the last file of a checkpoint") from error
    except (OSError, DataError) as error:
        raise CheckpointError(f"has an unreadable {SEAL} ({error!r})") from error
    sizes = _sizes(folder)
    wrong = sorted(name for name, file in seal.files.items() if sizes.get(name) != file.bytes)
    if wrong:
        state = (
            "is missing" if wrong[0] not in sizes else f"has {sizes[wrong[0]]} bytes of {seal.files[wrong[0]].bytes}"
        )
        raise CheckpointError(f"is damaged: {wrong[0]} {state}{_and_more(wrong)}")
    return seal


def check_contents(folder: Path, part: int = 0, parts: int = 1) -> None:
    """Compare files with the checksums in their seal; ``part`` of ``parts`` reads its share of them. Raises
    CheckpointError as :func:`read_seal`, or if a file is not as it was sealed."""
    seal = read_seal(folder)
    mine = _share_of(part, {name: file.bytes for name, file in seal.files.items()}, lambda name: range(parts))
    try:
        contents = checksums([folder / name for name in mine], flush=False)
    except OSError as error:
        raise CheckpointError(f"is damaged: {error}") from error
    wrong = [name for name, sums in zip(mine, contents, strict=True) if tuple(sums) != seal.files[name].crc32]
    if wrong:
        raise CheckpointError(f"is damaged: {wrong[0]} is not what was saved{_and_more(wrong)}")


def _share_of(reader: int, sizes: Mapping[str, int], readers: Callable[[str], Sequence[int]]) -> list[str]:
    """The files that ``reader`` reads of those with ``sizes``: each goes to one of its ``readers``, so that all read
    about as many bytes."""
    loads, mine = Counter[int](), []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        chosen = min(readers(name), key=lambda one: loads[one])
        loads[chosen] += sizes[name]
        if chosen == reader:
            mine.append(name)
    return mine


def _sizes(folder: Path) -> dict[str, int]:
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and path.name not in _UNSEALED
    }


def _and_more(wrong: Sequence[str]) -> str:
    return f", and {len(wrong) - 1} more files differ" if len(wrong) > 1 else ""


def checkpoint_folder(output_dir: str | Path, step: int) -> Path:
    """The folder of the checkpoint of ``step``, named as transformers names it."""
    return Path(output_dir) / f"{CHECKPOINT}-{step}"


def is_complete(folder: Path) -> bool:
    """Whether the checkpoint is sealed and its files have the sealed sizes."""
    try:
        read_seal(folder)
    except CheckpointError:
        return False
    return True


def resolve_resume(output_dir: str | Path, resume: bool | str | None) -> Path | None:
    """The checkpoint that ``training.resume_from_checkpoint`` means; None for a new run. A collective call: all ranks
    resume from the same one.

    ``True`` takes the newest that is complete on every rank and logs the names of those it skips. If none was ever
    completed, it starts a new run, so that one YAML serves the first start and every restart. A named folder must be
    complete. File contents are compared with the seal: the ranks of each machine share the reading.

    Raises:
        CheckpointError: the named folder is not a checkpoint, is incomplete or damaged, or holds a model alone; or
            every checkpoint that was completed is damaged now.
    """
    if not resume:
        return None
    if resume is True:
        return _newest_whole(Path(output_dir))
    with distributed.raise_on_all_ranks("training.resume_from_checkpoint"):
        if problem := _problem_with(Path(resume), distributed.on_this_machine()):
            older = (folder for folder in checkpoints_in(Path(resume).parent) if folder != Path(resume))
            whole = next((one for one in older if _problem_with(one, (0, 1)) is None), None)
            fix = "name a complete checkpoint-N folder" if whole is None else f"name {whole}, which is complete"
            raise CheckpointError(f"training.resume_from_checkpoint: {resume} {problem}; {fix}, or start a new run")
    return Path(resume)


def check_resume(checkpoint: Path, training: TrainingConfig) -> None:
    """Warn if another number of processes resumes: it resets random states, and may change the samples of a step.
    Raises CheckpointError if segments that wait in ``checkpoint`` would never be trained on: packing was switched, or
    another number of processes wrote it."""
    packing, written, now = training.packing, read_seal(checkpoint).world_size, distributed.world_size()
    packed = any(checkpoint.glob("carry_buffer_rank*.json"))
    if packed != packing:
        raise CheckpointError(
            f"{checkpoint}: was written with training.packing: {str(packed).lower()}, by which segments wait for a row "
            "or not; resume with that, or start a new run"
        )
    if written == now:
        return
    if packing:
        raise CheckpointError(
            f"{checkpoint}: written by {written} processes, resumed by {now}: each process has segments of its own "
            f"waiting for a packed row. Resume with {written} processes, or start a new run"
        )
    earlier = settings_of_run(checkpoint).get("training") or {}
    own = training.model_copy(update={name: earlier[name] for name in _OF_A_STEP if name in earlier})
    before, after = own.samples_per_step(written), training.samples_per_step(now)
    others = f", the order of samples changes, and a step has {after} samples instead of {before}"
    distributed.warn(
        f"{checkpoint} was written by {written} processes and is resumed by {now}: random states and the current "
        f"log line are reset{'' if before == after else others}"
    )


@contextmanager
def readable(checkpoint: Path, *files: str) -> Iterator[None]:
    """Reads ``files`` of a checkpoint. Raises CheckpointError if one passes its checksum but cannot be loaded."""
    try:
        yield
    except Exception as error:  # of JSON, pickle, torch, safetensors, DeepSpeed
        if isinstance(error, CoordExpError) or is_out_of_memory(error) or lost_each_other(error):
            raise  # nothing is wrong with the file
        raise CheckpointError(
            f"{checkpoint}: {' or '.join(files)} cannot be read ({type(error).__name__}: {str(error).strip()[:200]}); "
            "resume from an older checkpoint, or start a new run"
        ) from error


def warn_of_checkpoints_ahead(output_dir: Path, start: int) -> None:
    """Warn of complete checkpoints beyond ``start``, the finished steps of a run that resumes from an older one that it
    names: a later resume would take them for its own."""
    ahead = [one.name for one in checkpoints_in(output_dir) if _step_of(one) > start and is_complete(one)]
    if ahead:
        distributed.warn(
            f"{output_dir} has {', '.join(ahead)} of an earlier run, ahead of step {start} where this one starts; "
            "training.resume_from_checkpoint: true would resume from the newest. Move them away, or choose another "
            "training.output_dir"
        )


def delete_old(output_dir: Path, limit: int | None, *, newest: Path, best: Path | None) -> None:
    """Keep ``newest``, which must be complete, and ``best``; fill up to ``limit`` with the newest other complete ones.

    Delete everything older, incomplete checkpoints too. A folder that cannot be deleted is a warning.
    """
    if limit is None:
        return
    kept = {newest} if best is None else {newest, best}
    for folder in checkpoints_in(output_dir):
        if folder in kept:
            continue
        whole = is_complete(folder)
        if whole and len(kept) < limit:
            kept.add(folder)
        elif whole or _step_of(folder) < _step_of(newest):
            try:
                shutil.rmtree(folder)
            except OSError as error:
                logger.warning(f"{folder}: cannot be deleted as training.save_total_limit wants it: {error}")


def _newest_whole(output_dir: Path) -> Path | None:
    with distributed.raise_on_all_ranks(f"looking for checkpoints in {output_dir}"):
        mine = [folder.name for folder in checkpoints_in(output_dir)]
    folders = {output_dir / name for names in distributed.gather_json(mine) for name in names}
    finished: list[str] = []
    for folder in sorted(folders, key=_step_of, reverse=True):
        with distributed.raise_on_all_ranks(f"reading {folder}"):
            own = [_problem_with(folder, distributed.on_this_machine()), (folder / SEAL).exists()]
        seen = distributed.gather_json(own)
        rank, problem = next(((rank, problem) for rank, (problem, _) in enumerate(seen) if problem), (0, None))
        if problem is None:
            return folder
        by = f" (seen by rank {rank}; all need the same training.output_dir)" if len(seen) > 1 else ""
        distributed.warn(f"{folder} {problem}; skipping it{by}")
        if any(sealed for _, sealed in seen):
            finished.append(f"{folder.name} {problem}{by}")
    if finished:
        raise CheckpointError(
            f"training.resume_from_checkpoint: true found no checkpoint to resume from in {output_dir}, and a new run "
            f"would discard what was learned there: {'; '.join(finished)}. Repair or remove it, or choose another "
            "training.output_dir"
        )
    return None


def _problem_with(folder: Path, share: tuple[int, int]) -> str | None:
    # The reason why training cannot resume from `folder`, written to follow its name; None if it can. `share`: the part
    # of the contents to check, (0, 1) for all.
    try:
        if not read_seal(folder).resumable:
            return "holds the model alone (training.save_only_model: true)"
        check_contents(folder, *share)
    except CheckpointError as error:
        return str(error)
    return None


def _step_of(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


# Messages of torch's writer for a short write, and of safetensors for the system's error.
_DISK_FULL_MESSAGE = re.compile(
    r"unexpected pos \d+|file write failed|PytorchStreamWriter|No space left|os error (28|122|27)\b"
)


@contextmanager
def writing(folder: Path, needed_bytes: int, kept: str, what: str = "a checkpoint") -> Iterator[None]:
    """Writes ``what`` to ``folder``. ``needed_bytes``: its approximate size; ``kept``: a sentence on what is saved.
    Raises CheckpointError, whatever the library raised, if the disk is full or cannot be written."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        full = isinstance(error, OSError) and error.errno in DISK_FULL
        if not full and not _DISK_FULL_MESSAGE.search(str(error)):
            if not isinstance(error, OSError):
                raise
            raise CheckpointError(f"{folder} cannot be written ({error}). {kept}") from error
        usage = shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists()))
        why, cure = "its disk is full", "Free some space, or lower training.save_total_limit"
        if usage.free > needed_bytes:
            why, cure = "a quota, or a limit on the size of files (ulimit -f), is reached", "Raise it"
        raise CheckpointError(
            f"{folder} cannot be written: {why} ({_mb(usage.free)} of {_mb(usage.total)} free; {what} takes about "
            f"{_mb(needed_bytes)}). {kept}. {cure}"
        ) from error


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
