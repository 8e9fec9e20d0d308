"""One question, one place: who may call the primitives that give an answer. The table is also in docs/architecture.md.

A module that needs an answer asks the place. If this test names your module, call the place's function instead; a new
primitive of a question gets a row here."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "coordexp"


@dataclass(frozen=True)
class Place:
    """``calls``: only ``modules`` may make them: ``name``, ``.method``, ``object.method``, with the argument if it
    is text; or ``.name or``, the choice between an attribute and something else. ``rooms``: where the rule holds;
    elsewhere these calls are about something else. ``besides``: modules whose calls are not about the question, and
    why."""

    question: str
    modules: tuple[str, ...]
    calls: tuple[str, ...]
    rooms: tuple[str, ...] = ("",)
    besides: tuple[tuple[str, str], ...] = ()


PLACES = (
    Place(
        "How does a picture become pixels?",
        ("data/images.py",),
        ("Image.open", ".convert('RGB')", ".convert('RGBA')", ".convert('L')", ".convert('LA')",
         "ImageOps.exif_transpose", ".exif_transpose", "Image.frombytes", "Image.frombuffer"),
    ),
    Place(
        "Which image does a name mean, and which files of a folder are read?",
        ("data/find_images.py",),
        (".rglob", "os.walk", "os.scandir", ".iterdir", ".resolve", "os.path.realpath"),
        ("data/", "inference/", "evaluation/export.py", "recording/", "viewer/"),
        (("data/convert/assemble.py", "removes the folders that it made; never overwrites a source"),
         ("inference/evaluation.py", "is a model the run's own"),
         ("inference/prediction.py", "is a folder empty; compares settings of two runs"),
         ("inference/replay.py", "looks for a run's folder")),
    ),
    Place(
        "What do an annotation's numbers mean?",
        ("data/convert/numbers.py", "data/convert/shapes.py"),
        ("SourceShape", "bounds"),
        ("data/",),
        (("data/convert/per_image.py", "the corners of a LabelMe rectangle come in any order"),),
    ),
    Place(
        "When does a shape become bins?",
        ("data/convert/shapes.py", "data/tiles.py", "geometry.py"),
        ("to_bin",),
        besides=(("data/scenes.py", "draws its own shapes"),),
    ),
    Place(
        "What is in a user's text, JSON, YAML or XML file?",
        ("reading.py",),
        ("ET.parse", "ET.fromstring", "ET.iterparse", "ElementTree.parse", "ElementTree.fromstring", "yaml.safe_load",
         "yaml.load", "yaml.full_load", "yaml.compose", "yaml.parse", ".get_single_node", ".get_single_data"),
    ),
    Place(
        "Is this a folder or a model of the hub, and where are its files?",
        ("hub.py", "checkpoints/fetch.py"),
        ("snapshot_download", ".snapshot_download", ".hf_hub_download", "HubModel", "hub.fetch", "hub.resolve"),
    ),
    Place(
        "What travels with a checkpoint?",
        ("checkpoints/card.py",),
        ("Card", "Training"),
    ),
    Place(
        "Which number has a class?",
        ("data/class_list.py",),
        ("ClassNumbers", "distinct_descs", "class_list", ".classes or"),
        ("data/", "evaluation/", "inference/", "cli/", "modeling/", "training/"),
    ),
    Place(
        "Which pixels, and which score, does average precision use?",
        ("evaluation/coco_results.py",),
        ("COCO", "COCOeval", "COCOeval_faster", "OriginalImage"),
        ("evaluation/", "inference/", "cli/", "training/", "viewer/"),
        (("evaluation/answers.py", "the user's own image is its own original"),
         ("evaluation/export.py", "an image that was placed next to its annotations")),
    ),
    Place(
        "How is an address read?",
        ("addresses.py",),
        ("urlsplit", "urlparse", ".urlsplit", ".urlparse"),
    ),
    Place(
        "What does a run start from, and may it?",
        ("runs/start.py",),
        ("checked_changes", "newest_checkpoint"),
    ),
    Place(
        "How is a name shown?",
        ("printable.py", "cli/console.py", "data/progress_bar.py"),
        ("typer.echo", "typer.secho", "print", "Console", "_LiteralConsole"),
        besides=(("doctor/samples.py", "prints nothing"),),
    ),
)  # fmt: skip


@cache
def calls(code: str) -> list[tuple[int, str]]:
    """(line, call or choice) in all spellings of :attr:`Place.calls`."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.IfExp) or (isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or)):
            options = (node.body, node.orelse) if isinstance(node, ast.IfExp) else node.values
            found += [(node.lineno, f".{one.attr} or") for one in options if isinstance(one, ast.Attribute)]
        if not isinstance(node, ast.Call):
            continue
        spellings = []
        if isinstance(node.func, ast.Name):
            spellings = [node.func.id]
        elif isinstance(node.func, ast.Attribute):
            spellings = [f".{node.func.attr}", f"{ast.unparse(node.func.value)}.{node.func.attr}"]
        first = node.args[0] if node.args else None
        text = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None
        found += [(node.lineno, spelling) for spelling in spellings]
        if text is not None:
            found += [(node.lineno, f"{spelling}({text!r})") for spelling in spellings]
    return found


def strangers(place: Place, module: str, code: str) -> list[str]:
    """Calls in ``module`` (below src/coordexp) that only the place may make."""
    allowed = (*place.modules, *(name for name, _ in place.besides))
    if module in allowed or not module.startswith(place.rooms):
        return []
    return [f"{module}:{line}: {call}" for line, call in calls(code) if call in place.calls]


@pytest.mark.parametrize("place", PLACES, ids=[place.question for place in PLACES])
def test_a_question_is_answered_in_its_place_only(place: Place) -> None:
    modules = {path.relative_to(SOURCE).as_posix(): path.read_text("utf-8") for path in SOURCE.rglob("*.py")}
    assert {*place.modules, *(name for name, _ in place.besides)} <= modules.keys()
    found = [text for module, code in modules.items() for text in strangers(place, module, code)]
    assert found == [], f"{place.question} is answered in {', '.join(place.modules)}"
    made = {call for module in place.modules for _, call in calls(modules[module])}
    assert made & set(place.calls), "the place calls none of its primitives any more; correct the table"
    for module, _ in place.besides:
        assert set(place.calls) & {call for _, call in calls(modules[module])}, f"{module} needs no exception any more"


@pytest.mark.parametrize(
    ("module", "code", "found"),
    [
        ("cli/new.py", "from PIL import Image\nx = Image.open(path)", 1),
        ("inference/door.py", "def f(image):\n    return image.convert('RGB')", 1),
        ("evaluation/drawing.py", "image.convert(mode='RGB'); image.convert()", 0),
        ("data/convert/kitti.py", "names = sorted(folder.rglob('*.png'))", 1),
        ("data/convert/kitti.py", "import os\nfor a, b, c in os.walk(folder): pass", 1),
        ("inference/door.py", "record = Record(path.resolve())", 1),
        ("checkpoints/folder.py", "path.resolve()", 0),
        ("data/images.py", "Image.open(path)", 0),
        ("inference/new.py", "listed = read_card(path).classes or tuple(allowed)", 1),
        ("inference/new.py", "listed = self.classes if classes is None else tuple(classes)", 1),
        ("cli/new.py", "listed = class_list(read_jsonl(path)) if is_dataset(path) else class_list_of(path)", 1),
        ("cli/new.py", "new = sorted(labels.difference(card.classes)) if card.classes else []", 0),
        ("cli/new.py", "checked_changes(config, newest_checkpoint(config))", 2),
        ("cli/new.py", "typer.echo(name); print(name)", 2),
    ],
)
def test_a_new_door_is_found(module: str, code: str, found: int) -> None:
    assert sum(len(strangers(place, module, code)) for place in PLACES) == found


def test_the_page_has_every_place() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    for place in PLACES:
        assert f"| {place.question} | {', '.join(f'`{module}`' for module in place.modules)} |" in page
