"""``coordexp predict``: objects found in images. ``coordexp export``: predictions in other tools' formats."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from coordexp.cli.console import (
    check_checkpoint,
    echo,
    no_bars_in_log_files,
    on_interrupt,
    open_console,
    refuse_filled,
    refuse_idle,
    say,
    say_written,
)
from coordexp.cli.tiling import TileOverlap, Tiles
from coordexp.cli.train import is_config, split_words
from coordexp.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rich.console import Console

    from coordexp.config.resolved import AnswerConfig
    from coordexp.inference.prediction import PredictionResult

ModelOption = Annotated[Path | None, typer.Option(help="Checkpoint to use instead of model.model.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Use only the first N images.")]
Words = Annotated[
    list[str],
    typer.Argument(
        metavar="[CONFIG.yaml] IMAGE|FOLDER|PATTERN|DATA.jsonl... [KEY=VALUE]...",
        help="A run's configuration, or --model instead; images, folders, patterns such as 'frames/*.png' or "
        "frame_%05d.png, datasets; keys to set, e.g. rollout_matching.max_new_tokens=512.",
    ),
]
ConstantScore = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="Score of every prediction, instead of its tokens' probability."),
]
Classes = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,NAME|FILE",
        help="The only names that answers may contain: a list, a text file with one a line, or those of a DATA.jsonl.",
    ),
]
MinConfidence = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="Leave out objects of a lower confidence; evaluate prints a good threshold."),
]
Answers = Annotated[
    int,
    typer.Option(min=1, help="Answers per image, merged; the first is greedy, others are sampled, at 0.7 by default."),
]
_MOST_REFUSED = 20  # images that are not placed, whose reasons are printed
_SHOWN = 20  # images whose objects are printed


def predict(
    words: Words,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of predictions.jsonl and COCO's results [a new one, outputs/predict]."),
    ] = None,
    model: ModelOption = None,
    limit: Limit = None,
    constant_score: ConstantScore = None,
    classes: Classes = None,
    min_confidence: MinConfidence = None,
    answers: Answers = 1,
    tiles: Tiles = None,
    overlap: TileOverlap = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer [the run's own].")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of sampled answers [training.seed].")] = None,
    save_images: Annotated[
        bool, typer.Option("--save-images", help="Write each image with its objects drawn over it.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete the answers in --out first.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary as JSON on stdout.")] = False,
) -> None:
    """Run a model on images.

    Boxes are in pixels of the images as given. Images that cannot be read are reported and left out. Answers are
    written as they come: the same command with the same --out continues where it stopped. predictions.jsonl keeps
    objects below --min-confidence.
    """
    from coordexp.data.tiles import Tiling

    tiling = Tiling.asked(tiles, overlap)
    names, arguments = split_words(words)
    config = Path(names.pop(0)) if names and is_config(names[0]) else None
    if late := next(filter(is_config, names), None):
        raise ConfigError(f"{late}: is a configuration, not an image; give one, as the first word")
    from coordexp.data.image_sources import as_path, is_pattern

    images = [as_path(name) for name in names]
    if not images:
        raise ConfigError("name images: files, folders, patterns or datasets")
    if config is None and model is None:
        raise ConfigError("name the checkpoint that answers with --model, or a run's YAML before the images")
    from coordexp.hub import hub_model, no_such_folder

    # Report everything that is missing at once, before anything heavy is imported.
    missing = [str(path) for path in images if not path.exists() and not is_pattern(path)]
    problems = [f"no such image, folder or dataset: {', '.join(missing)}"] if missing else []
    if config is not None and not config.exists():
        problems.append(f"{config}: no such file (working directory: {Path.cwd()})")
    if model is not None and hub_model(model) is None and not model.is_dir():
        problems.append(f"--model: {model}: {no_such_folder(model)}")
    if out is not None and out.exists() and not out.is_dir():
        problems.append(f"--out: {out}: is a file; name a folder")
    if problems:
        raise DataError("\n".join(problems))
    if model is not None:
        model = check_checkpoint(model)
    run = _configuration(config, model, max_new_tokens, seed, arguments)
    from coordexp.inference.session import read_class_names, with_several_answers

    run = with_several_answers(run, answers, arguments)
    if min_confidence is not None and constant_score is not None and answers == 1:
        raise ConfigError("--min-confidence needs confidences; leave out --constant-score")
    class_names = read_class_names(classes, model or run.model.model)
    folder = out or _new_folder(Path("outputs/predict"))
    console = open_console(stderr=as_json)
    continues = f"answers so far are in {folder}; the same command with --out {folder} continues"
    with on_interrupt(lambda: continues if folder.exists() else "nothing is answered yet"):
        from coordexp.inference.asking import Asking
        from coordexp.inference.prediction import run_prediction

        no_bars_in_log_files()
        result = run_prediction(
            run, console, source=images if len(images) > 1 else images[0], output=folder, model=model, limit=limit,
            score="token_probability" if constant_score is None else constant_score,
            skip_broken=True, save_images=save_images, min_confidence=min_confidence,
            overwrite=overwrite, asking=Asking(class_names, answers, tiling),
        )  # fmt: skip
    if not as_json:
        _print(console, result, min_confidence)
    elif not console.quiet:
        _print_json(result)


def _configuration(
    config: Path | None, model: Path | None, max_new_tokens: int | None, seed: int | None, arguments: list[str]
) -> AnswerConfig:
    if config is None:
        from coordexp.inference.session import inference_config

        assert model is not None
        return inference_config(model, arguments, max_new_tokens=max_new_tokens, seed=seed)
    from coordexp.checkpoints.card import with_own_template
    from coordexp.checkpoints.fetch import with_model_here
    from coordexp.config import load_config
    from coordexp.config.checks import check_paths
    from coordexp.config.resolved import AnswerConfig

    given = {"rollout_matching.max_new_tokens": max_new_tokens, "training.seed": seed}
    given = {key: value for key, value in given.items() if value is not None}
    run = load_config(config, given, arguments)
    if model is None:
        check_paths({"model.model": run.model.model})
        run = with_model_here(run)
        check_checkpoint(Path(run.model.model))
    return AnswerConfig.of_run(with_own_template(run, model))


def _print(console: Console, result: PredictionResult, min_confidence: float | None) -> None:
    from coordexp.geometry import pixel_box
    from coordexp.printable import printable

    for answer in result.answers[:_SHOWN]:
        objects = []
        for obj in answer.pred:
            box = ", ".join(f"{side:.0f}" for side in pixel_box(obj, answer.width, answer.height))
            number = obj.score if obj.confidence is None else obj.confidence
            share = "" if obj.answers is None else f" {obj.answers}/{answer.num_answers}"
            objects.append(f"{obj.desc}{'' if number is None else f' {number:.2f}'}{share} ({box})")
        problem = "" if answer.problem is None else f" [{answer.problem}]"
        say(console, printable(f"{answer.sample_id}: {'; '.join(objects) or 'nothing found'}{problem}"))
    if len(result.answers) > _SHOWN:
        say(console, f"… and {len(result.answers) - _SHOWN} more images")
    incomplete = sum(answer.problem is not None for answer in result.answers)
    if incomplete:
        cut = sum(answer.truncated for answer in result.answers)
        say(
            console,
            f"note: {incomplete} answers are incomplete, {cut} of them cut off; the reasons are in brackets",
        )
    if result.left_out:
        say(console, f"{result.left_out} objects of a confidence below {min_confidence:g} are left out")
    resumed = f", {result.resumed} of them by an earlier run" if result.resumed else ""
    skipped = f"; {len(result.skipped)} skipped, which could not be read" if result.skipped else ""
    say(console, f"{result.images} images answered{resumed}{skipped}")
    say_written(console, result.files)


def _print_json(result: PredictionResult) -> None:
    broken = [{"image": image, "reason": reason} for image, reason in result.skipped]
    files = [str(path) for path in result.files]
    problems = {answer.sample_id: answer.problem for answer in result.answers if answer.problem is not None}
    fields = {"images": result.images, "resumed": result.resumed, "skipped": broken, "problems": problems,
              "left_out": result.left_out, "files": files}  # fmt: skip
    echo(json.dumps(fields))


def _new_folder(path: Path) -> Path:
    number = 1
    while (folder := path if number == 1 else path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    return folder


# Notes on objects without area.
_FLAT_IN_COCO = "their boxes are written half a bin wide"
_FLAT_ELSEWHERE = "data convert and other readers leave such objects out"
# The keys of coordexp.evaluation.export.FORMATS.
Format = Literal["coco", "yolo", "yolo-obb", "voc", "labelme", "csv", "dota"]


def export(
    form: Annotated[Format, typer.Argument(metavar="FORMAT", help="coco, yolo, yolo-obb, voc, labelme, csv or dota.")],
    predictions: Annotated[
        Path,
        typer.Argument(metavar="PREDICTIONS|DATA.jsonl", help="A predictions.jsonl, a folder with one, or a dataset."),
    ],
    out: Annotated[Path, typer.Option(help="Folder of what is written.")],
    annotations: Annotated[
        Path | None, typer.Option(help="Your COCO or LVIS file; its ids of images and categories are kept. For coco.")
    ] = None,
    classes: Annotated[
        Path | None,
        typer.Option(
            help="The class list that numbers follow: names, one a line, a data.yaml, a DATA.jsonl or a checkpoint "
            "[the one that answered]. For yolo and coco."
        ),
    ] = None,
    min_confidence: MinConfidence = None,
    min_score: Annotated[
        float | None, typer.Option(min=0, max=1, help="Leave out objects of a lower score, which only ranks them.")
    ] = None,
    scores: Annotated[bool, typer.Option("--scores", help="Append confidences to lines. For yolo.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write into a folder that is not empty.")] = False,
    fractions: Annotated[
        bool, typer.Option("--fractions", help="Fractions of pixels instead of whole numbers. For voc.")
    ] = False,
    images: Annotated[
        bool, typer.Option("--images", help="Copy the images too, and use their pixels. Always for yolo.")
    ] = False,
    link: Annotated[
        bool, typer.Option("--link", help="Hard links instead of copies: an edited image changes in both places.")
    ] = False,
) -> None:
    """Write predictions or a dataset as COCO, YOLO, VOC, DOTA or others.

    Coordinates are in pixels of the original images, scores are confidences if the predictions have them.
    """
    from coordexp.data.class_list import choose_list
    from coordexp.data.completed import completed_objects
    from coordexp.data.jsonl import read_jsonl
    from coordexp.data.polygons import shape_area
    from coordexp.evaluation.answers import class_list_of, each_changed, read_answers
    from coordexp.evaluation.confidence import at_least, scored_at_least
    from coordexp.evaluation.export import FORMATS, IMAGE_FOLDERS, dataset_answers, is_dataset, place_images
    from coordexp.evaluation.users_terms import read_terms

    yolo = ("yolo", "yolo-obb")
    refuse_idle("--annotations", annotations is not None and form != "coco", "belongs to coco")
    refuse_idle("--classes", classes is not None and form not in (*yolo, "coco"), "belongs to yolo, yolo-obb and coco")
    refuse_idle("--scores", scores and form not in yolo, "belongs to yolo and yolo-obb")
    refuse_idle("--fractions", fractions and form != "voc", "belongs to voc")
    refuse_idle("--link", link and not images and form not in yolo, "belongs to --images")
    terms = read_terms(annotations, classes, first=1 if form == "coco" else 0)
    of_dataset = is_dataset(predictions)
    annotated = of_dataset and form == "coco"  # other formats have one list of objects
    belongs = f"belongs to predictions, and {predictions} is a dataset"
    refuse_idle("--min-confidence", of_dataset and min_confidence is not None, belongs)
    refuse_idle("--min-score", annotated and min_score is not None, belongs)
    records = read_jsonl(predictions) if of_dataset else []
    answers = dataset_answers(records, annotations=annotated) if of_dataset else read_answers(predictions)
    completed = completed_objects(records)
    kept = () if of_dataset else class_list_of(predictions)
    terms = replace(terms, classes=choose_list(terms.classes, checkpoint=kept, records=records))
    if not overwrite:
        refuse_filled(out, "or add --overwrite")
    console = open_console()
    if min_score is not None:
        answers, left_out = scored_at_least(answers, min_score)
        say(console, f"{left_out} objects of a score below {min_score:g} are left out")
    if min_confidence is not None:
        answers, left_out = at_least(answers, min_confidence)
        say(console, f"{left_out} objects of a confidence below {min_confidence:g} are left out")
    # Other tools compare their scores with thresholds.
    answers = each_changed(answers, lambda o: o if o.confidence is None else replace(o, score=o.confidence))
    originals = answers
    if images or form in yolo:
        answers, refused = place_images(answers, out / IMAGE_FOLDERS[form], link=link)
        if refused:
            more = ["…"] if len(refused) > _MOST_REFUSED else []
            lines = "\n  ".join([*refused[:_MOST_REFUSED], *more])
            say(console, f"note: {len(refused)} images were not placed next to the annotations:\n  {lines}")
    options = {
        "coco": {"completed": completed if of_dataset else None, "originals": originals},
        "voc": {"fractions": fractions},
        **{key: {"scores": scores} for key in yolo},
    }.get(form, {})
    exported = FORMATS[form](answers, out, terms, **options)
    if completed and form != "coco":
        count = sum(map(len, completed.values()))
        say(console, f"note: {form} cannot say which model added {count} completed objects; coco can")
    objects = [obj for answer in answers for obj in ((answer.gt or ()) if annotated else answer.pred)]
    flat = sum(shape_area(obj.kind, obj.bins) == 0 for obj in objects)
    if flat:
        say(console, f"note: {flat} objects have no area; {_FLAT_IN_COCO if form == 'coco' else _FLAT_ELSEWHERE}")
    if of_dataset and form in (*yolo, "coco") and annotations is None and classes is None:
        say(console, f"note: numbers follow the names in {predictions}; for another split, name it with --classes")
    for note in exported.notes:
        say(console, f"note: {note}")
    say(console, f"{len(objects)} objects in {len(answers)} images")
    say_written(console, exported.files)
