"""Large datasets: validated once by all cores, then mapped into memory by every later start and every process of a run.

A dataset has a folder in :func:`~coordexp.data.files.cache_folder` with three files: a lock, an Arrow file with
the records, and a NumPy file (N, 2) with size and modification time of each image that passed the check. Their names
change with the JSONL's size and modification time, and with the versions that decide what is valid.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from coordexp import __version__
from coordexp.data.files import VARIABLE, cache_folder, whole_binary_file
from coordexp.data.images import image_stat
from coordexp.data.jsonl import (
    NO_RECORDS,
    RefusedLine,
    image_problem,
    image_problems,
    numbered_lines,
    parse_line,
    raise_together,
    read_jsonl,
)
from coordexp.errors import DataError
from coordexp.records import ImageRecord

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

CACHE_VERSION = 4  # raise it when a valid line or image becomes invalid, or when the files' format changes
CACHE_MIN_BYTES = 4 << 20  # smaller datasets are read by every process at every start, which takes about a second
WAIT_S = 1800.0
_PIECE_LINES = 1_000  # that one task of a worker validates
_PIECE_ROWS = 20_000  # records per task of a worker that checks images
_NOT_CHECKED = -1  # instead of a file's size and modification time

# The key of a record's metadata with the rule by which its image was resized; has a column, together with the bin rule.
PREPARED = "prepared"
_DESCS = "descs"  # the column of a record's distinct descriptions

_Task = TypeVar("_Task")
_Done = TypeVar("_Done")


def open_records(path: str | Path, *, limit: int | None = None, wait_s: float = WAIT_S) -> Sequence[ImageRecord]:
    """The records of a dataset, or its first ``limit`` (>= 1), in file order. :func:`check_images` checks their images.
    If several processes open the same dataset, one validates it; the others wait for at most ``wait_s`` seconds. Raises
    DataError as :func:`~coordexp.data.jsonl.read_jsonl`, if the wait timed out, or if the cache cannot be written."""
    path = Path(path)
    if (limit is not None and limit < 1) or not path.is_file() or path.stat().st_size < CACHE_MIN_BYTES:
        return read_jsonl(path, limit=limit)  # which raises for a wrong limit or path
    with _locked_folder(path, wait_s) as folder:
        key = _key(path)
        file = folder / f"{key}-{limit or 'all'}.arrow"
        if not file.exists():
            _validate(path, limit, file)
            if _key(path) != key:
                file.unlink()
                raise DataError("changed while it was read; start again", path=path)
            for old in (*folder.glob("*.arrow"), *folder.glob("*.npy")):
                if not old.name.startswith(key):
                    old.unlink()  # processes that have mapped it keep it
    return CachedRecords(file, Path(os.path.abspath(path)))


def check_images(*datasets: Sequence[ImageRecord], wait_s: float = WAIT_S) -> None:
    """As :func:`~coordexp.data.jsonl.check_dataset`, but of cached datasets only new and changed files are read. Raises
    one DataError with all problems, or if waiting for another process that checks the images timed out."""
    problems: list[DataError] = []
    for records in datasets:
        cached = isinstance(records, CachedRecords)
        problems += _cached_image_problems(records, wait_s) if cached else image_problems(records)
    raise_together(problems, None)


@lru_cache(maxsize=4)
def _open_table(file: Path) -> pa.Table:
    import pyarrow as pa

    try:
        return pa.ipc.open_file(pa.memory_map(str(file))).read_all()
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"a cached dataset cannot be read ({error}); delete the file", path=file) from error


class CachedRecords(Sequence[ImageRecord]):
    """The records of the dataset ``path`` from its Arrow file, each parsed when it is read. Pickles as two paths."""

    def __init__(self, file: Path, path: Path) -> None:
        self.file = file
        self.path = path
        self.table = _open_table(file)

    def __reduce__(self) -> tuple[Any, ...]:
        return CachedRecords, (self.file, self.path)

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(len(self)))]
        text, line = self.table["text"][index].as_py(), self.table["line"][index].as_py()
        return parse_line(text, path=self.path, line=line)

    def pixel_areas(self) -> tuple[int, int]:
        """The smallest and the largest area of an image in pixels."""
        areas = self.table["width"].to_numpy() * self.table["height"].to_numpy()
        return int(areas.min()), int(areas.max())

    def distinct_preparations(self) -> list[ImageRecord]:
        """One record per distinct ``metadata.prepared`` (None counts as a value), in file order."""
        column = self.table[PREPARED]
        return [self[index] for index in sorted(column.index(value).as_py() for value in column.unique())]

    def distinct_descs(self) -> set[str]:
        """The distinct descriptions of all objects."""
        return {desc for chunk in self.table[_DESCS].chunks for desc in chunk.flatten().unique().to_pylist()}

    def descs_by_record(self) -> Iterator[frozenset[str]]:
        """The distinct descriptions of each record's objects."""
        for chunk in self.table[_DESCS].chunks:
            yield from map(frozenset, chunk.to_pylist())


def _key(path: Path) -> str:
    from PIL import __version__ as pillow

    seen = path.stat()
    parts = (seen.st_size, seen.st_mtime_ns, CACHE_VERSION, __version__, pillow)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@contextmanager
def _locked_folder(path: Path, wait_s: float) -> Iterator[Path]:
    from filelock import FileLock, Timeout

    slug = re.sub(r"[^A-Za-z0-9._-]", "_", path.name)[:60]
    place = hashlib.sha256(os.fsencode(os.path.abspath(path))).hexdigest()[:16]
    folder = cache_folder() / "datasets" / f"{slug}-{place}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock", timeout=wait_s):
            yield folder
    except Timeout:
        raise DataError(
            f"waited {wait_s:.0f} s for another process that validates {path}; if it is alive, raise "
            "training.ddp_timeout, otherwise end it",
            path=folder / "lock",
        ) from None
    except OSError as error:
        raise DataError(
            f"the dataset {path} cannot be cached ({error.strerror or error}); free space, or set {VARIABLE} to "
            "another folder",
            path=error.filename or folder,
        ) from error


def _validate(path: Path, limit: int | None, file: Path) -> None:
    import pyarrow as pa

    lines, done_bytes = numbered_lines(path, limit), 0
    pieces = iter(lambda: list(islice(lines, _PIECE_LINES)), [])
    problems: list[DataError] = []
    writer: pa.RecordBatchFileWriter | None = None
    with whole_binary_file(file) as out, _progress(f"validating {path.name}") as progress:
        for batch, refused, piece_bytes in _in_processes(partial(_validate_piece, path), pieces):
            problems += refused
            if not problems:
                writer = writer or pa.ipc.new_file(out, batch.schema)
                writer.write_batch(batch)
            done_bytes += piece_bytes
            progress(done_bytes, path.stat().st_size)
        raise_together(problems, path)
        if writer is None:
            raise DataError(NO_RECORDS, path=path)
        writer.close()


def _validate_piece(path: Path, lines: list[tuple[int, bytes]]) -> tuple[pa.RecordBatch, list[RefusedLine], int]:
    # In a worker. Returns the valid lines as a batch, the errors of the others, and the number of bytes read.
    # The batch's text is parsed again when a record is read, which costs far less than opening its image. The other
    # columns are read from all records at once: `image` is an absolute path in the file system's bytes.
    import pyarrow as pa

    schema = pa.schema([
        ("line", pa.int64()), ("text", pa.binary()), ("image", pa.binary()), ("width", pa.int64()),
        ("height", pa.int64()), (PREPARED, pa.string()), (_DESCS, pa.list_(pa.string())),
    ])  # fmt: skip
    rows: list[dict[str, Any]] = []
    refused: list[RefusedLine] = []
    for number, text in lines:
        try:
            record = parse_line(text, path=path, line=number)
        except RefusedLine as error:
            refused.append(error)
            continue
        rows.append({
            "line": number,
            "text": text,
            "image": os.fsencode(record.image),
            "width": record.width,
            "height": record.height,
            PREPARED: json.dumps(record.metadata.get(PREPARED)),
            _DESCS: sorted({obj.desc for obj in record.objects}),
        })  # fmt: skip
    return pa.RecordBatch.from_pylist(rows, schema), refused, sum(len(text) for _, text in lines)


def _cached_image_problems(records: CachedRecords, wait_s: float) -> list[DataError]:
    import numpy as np

    asked, rows = time.time(), len(records)
    with _locked_folder(records.path, wait_s) as folder:
        file = folder / f"{records.file.stem}.npy"
        try:
            known_N2 = np.load(file, allow_pickle=False)
        except (OSError, ValueError, EOFError):  # not there, or damaged
            known_N2 = np.full((rows, 2), _NOT_CHECKED, np.int64)
        if (known_N2 != _NOT_CHECKED).all() and file.stat().st_mtime >= asked:
            return []  # another process checked them while this one waited for the lock
        tasks = [(start, known_N2[start : start + _PIECE_ROWS]) for start in range(0, rows, _PIECE_ROWS)]
        check = partial(_problems_of, records.file)
        results = map(check, tasks) if len(tasks) == 1 else _in_processes(check, tasks)
        problems: list[DataError] = []
        with _progress(f"checking the images of {records.path.name}") as progress:
            for (start, known_P2), (states_P2, found) in zip(tasks, results, strict=True):
                known_P2[:] = states_P2  # a view of known_N2
                problems += [DataError(f"{records.path.name}:{line}: {text}") for line, text in found]
                progress(start + len(known_P2), rows)
        with whole_binary_file(file, flush=False) as out:
            np.save(out, known_N2, allow_pickle=False)
    return problems


def _problems_of(file: Path, task: tuple[int, np.ndarray]) -> tuple[np.ndarray, list[tuple[int, str]]]:
    # In a worker. `task`: index of the first row, and the known states of it and the rows after it. Returns their
    # states now, and (line, problem) of each image that cannot be used.
    import numpy as np

    start, known_P2 = task
    rows = _open_table(file).slice(start, len(known_P2))
    images: list[bytes] = rows["image"].to_pylist()
    states: list[tuple[int, int]] = []
    for image in images:
        try:
            seen = image_stat(image)
        except OSError:  # the check of its header says why
            states.append((_NOT_CHECKED, _NOT_CHECKED))
        else:
            states.append((seen.st_size, seen.st_mtime_ns))
    states_P2 = np.array(states, np.int64)
    changed = ((states_P2 != known_P2) | (states_P2 == _NOT_CHECKED)).any(axis=1)
    problems: list[tuple[int, str]] = []
    for row in changed.nonzero()[0].tolist():
        image = Path(os.fsdecode(images[row]))
        declared = rows["width"][row].as_py(), rows["height"][row].as_py()
        text = image_problem(image, declared)
        if text is not None:
            states_P2[row] = _NOT_CHECKED
            problems.append((rows["line"][row].as_py(), text))
    return states_P2, problems


def _in_processes(work: Callable[[_Task], _Done], tasks: Iterable[_Task]) -> Iterator[_Done]:
    # Each task's result, in order, from as many forked workers as this process may use cores.
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    left = iter(tasks)
    # Forked: a spawned worker would import the caller's whole program first. The work uses neither torch nor threads.
    try:
        with ProcessPoolExecutor(workers, get_context("fork"), _start_worker, (os.getpid(),)) as pool:
            submitted = deque(pool.submit(work, task) for task in islice(left, 2 * workers))
            try:
                while submitted:
                    result = submitted.popleft().result()
                    submitted.extend(pool.submit(work, task) for task in islice(left, 1))
                    yield result
            finally:
                pool.shutdown(cancel_futures=True)
    except BrokenProcessPool as error:
        raise DataError(
            "a process that validates the dataset was killed, probably for lack of memory; start again"
        ) from error


def _start_worker(parent: int) -> None:
    # The command's handlers are its own. Ctrl-C reaches the parent too, which ends the pool.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # records have no cycles, and looking for them takes a quarter of the time

    def end_with_parent() -> None:  # the pool's workers do not notice that their parent was killed
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=end_with_parent, name="end-with-parent", daemon=True).start()


@contextmanager
def _progress(description: str) -> Iterator[Callable[[int, int], None]]:
    from coordexp.data.progress_bar import literal_console, reporting

    with reporting(literal_console(stderr=True), description, "%", after_s=2.0) as report:
        yield lambda done, total: report(100 * done // total, 100)
