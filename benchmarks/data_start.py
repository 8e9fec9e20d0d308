"""How long does a run take to open its dataset, and how much memory does that cost each of its processes?

Writes sets of synthetic records (7 objects each on the average, a fifth of them polygons), every record with an image
file of its own (hard links to a few JPEGs: each is a path that must be looked up and a header that must be read), and
opens each in a fresh process: cold (lines validated, images' headers read), warm (later starts, and the other processes
of a run), and as every start did it before (plain; up to --plain-up-to records). The peer is
`datasets.load_dataset("json")`, in the same run, which converts, checks no value and opens no image.

Wall time needs an idle machine; processor seconds (of all processes of a start) are for one that is not. Memory: the
peak of resident pages of the one process (VmHWM) beyond that of a process that has imported the same packages; "own"
are the pages among them that it does not share with another process at the end (RssAnon), beyond the same.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from reporting import machine, parser, positive, positive_list, print_machine, usable_cores, with_threads, write_json
from rich.console import Console
from rich.table import Table

LINKS = 50_000  # to one file; ext4 takes 65,000
SIZE = (640, 480)

CHILD = """
import json, os, resource, sys, time
how, data = sys.argv[1], sys.argv[2]
import numpy, PIL.Image, rich.progress
if how.startswith("datasets"):
    import datasets
else:
    import pyarrow
    from coordexp.data import dataset_cache
    from coordexp.data.dataset_cache import check_images, open_records
    from coordexp.data.jsonl import check_dataset, read_jsonl

def memory():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return {name: int(fields[name].split()[0]) / 1024 for name in ("VmHWM", "RssAnon")}

def seconds():
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in both)

before, cpu, wall = memory(), seconds(), time.perf_counter()
if how == "datasets":
    found = datasets.load_dataset("json", data_files=data, cache_dir=os.environ["PEERS_CACHE"], split="train")
elif how == "plain":
    found = read_jsonl(data)
    check_dataset(found)
else:
    dataset_cache.CACHE_MIN_BYTES = 0
    found = open_records(data)
    check_images(found)
wall, cpu, after = time.perf_counter() - wall, seconds() - cpu, memory()
found[len(found) // 2]
print(json.dumps({
    "records": len(found), "wall_s": wall, "cpu_s": cpu,
    "peak_mb": after["VmHWM"] - before["VmHWM"], "own_mb": after["RssAnon"] - before["RssAnon"],
}))
"""


def main(argv: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--records", type=positive_list, default=[10_000, 100_000], help="[10000,100000]")
    flags.add_argument("--plain-up-to", type=positive, default=100_000, help="read plainly sets up to this [100000]")
    flags.add_argument("--folder", type=Path, help="where the sets are written [a temporary folder]")
    options = flags.parse_args(argv)
    console = Console()
    where = machine()
    environment = with_threads(os.environ, options.threads)
    print_machine(console, where, records=options.records, cores=usable_cores())
    results: list[dict[str, Any]] = []
    for count in options.records:
        with tempfile.TemporaryDirectory(prefix="data-start-", dir=options.folder) as folder:
            data = write_set(Path(folder), count)
            for how in ("cold", "warm", "plain", "datasets cold", "datasets warm"):
                if how != "plain" or count <= options.plain_up_to:
                    found = opened(how, data, Path(folder), environment)
                    result = {"how": how, "set_mb": data.stat().st_size / 2**20, **found}
                    results.append(result)
                    console.print(result, highlight=False, style="dim")
                    write_json(options.json, "data_start", where, vars(options), results, complete=False)
    console.print(table(results))
    write_json(options.json, "data_start", where, vars(options), results)


def write_set(folder: Path, count: int) -> Path:
    """A set of ``count`` records with an image file each."""
    rng = random.Random(0)
    noise = Image.effect_noise(SIZE, 40).convert("RGB")
    data = folder / "set.jsonl"
    with data.open("w", encoding="utf-8") as file:
        for number in range(count):
            source = folder / f"source-{number // LINKS}.jpg"
            if number % LINKS == 0:
                noise.save(source, quality=50)
            image = Path("images", f"{number // 10_000:04d}", f"{number:08d}.jpg")
            if number % 10_000 == 0:
                (folder / image).parent.mkdir(parents=True)
            os.link(source, folder / image)
            objects = [_object(rng) for _ in range(min(40, int(rng.expovariate(1 / 7.3))))]
            line = {"images": [str(image)], "width": SIZE[0], "height": SIZE[1], "objects": objects}
            file.write(json.dumps(line) + "\n")
    return data


def _object(rng: random.Random) -> dict[str, Any]:
    desc = f"class {rng.randrange(80)}"
    if rng.random() < 0.2:
        return {"desc": desc, "poly": [rng.randrange(1000) for _ in range(24)]}
    x, y = rng.randrange(900), rng.randrange(900)
    return {"desc": desc, "bbox_2d": [x, y, rng.randrange(x, 1000), rng.randrange(y, 1000)]}


def opened(how: str, data: Path, folder: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """The report of a fresh process that opens ``data``."""
    places = {"COORDEXP_CACHE": str(folder / "cache"), "PEERS_CACHE": str(folder / "peers-cache")}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "peers-home")}
    load = os.getloadavg()[0]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, how.split()[0], str(data)],
        env={**environment, **places, **offline},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return {"load_1min": round(load, 2), **json.loads(done.stdout.splitlines()[-1])}


def table(results: Sequence[dict[str, Any]]) -> Table:
    """A line per set and way."""
    found = Table("records", "set", "how", "wall", "processor", "peak memory", "own memory", "load")
    for one in results:
        found.add_row(
            f"{one['records']:,}", f"{one['set_mb']:.0f} MB", one["how"], f"{one['wall_s']:.2f} s",
            f"{one['cpu_s']:.2f} s", f"{one['peak_mb']:.0f} MB", f"{one['own_mb']:.0f} MB", f"{one['load_1min']:.1f}",
        )  # fmt: skip
    return found


if __name__ == "__main__":
    main()
