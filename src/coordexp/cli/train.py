"""``coordexp train``, ``demo``, ``init`` and ``config``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordexp import distributed
from coordexp.cli.console import check_checkpoint, checked_inputs, echo, no_bars_in_log_files, open_console, say
from coordexp.cli.usage import App
from coordexp.errors import CheckpointError, ConfigError
from coordexp.heavy_imports import heavy_imports

if TYPE_CHECKING:
    from coordexp.config import RunConfig

_SHARDS = 8  # processes of a sharded run, where launch.learner_devices names none

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="The run's configuration.")]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Keys to set on top, e.g. training.max_steps=3; values are YAML."),
]
Print = Annotated[
    bool,
    typer.Option("--print", help="Print the resolved configuration, with the source of each value; start nothing."),
]


def split_words(words: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Words of a command line: those that name files, and those that set keys (``key.path=value``)."""
    from coordexp.config.source import is_argument

    keys = [word for word in words or () if is_argument(word)]
    return [word for word in words or () if word not in keys], keys


def is_config(word: str) -> bool:
    return word.lower().endswith((".yaml", ".yml"))


def separate_config(names: Sequence[str], what: str) -> tuple[Path | None, Path]:
    """The YAML among ``names``, if there is one, and the one other file. Raises ConfigError; ``what``: its name."""
    configs = [Path(name) for name in names if is_config(name)]
    others = [Path(name) for name in names if not is_config(name)]
    if len(others) != 1 or len(configs) > 1:
        raise ConfigError(f"expected one {what}, and at most one YAML; got {' '.join(names) or 'neither'}")
    return (configs[0] if configs else None), others[0]


def print_config(
    config: Path,
    arguments: Sequence[str],
    plain: bool = False,
    only_set: bool = False,
    overrides: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Print the resolved configuration as YAML, with sources; advice on stderr. Returns it."""
    from coordexp.config import advice
    from coordexp.config.from_yaml import annotated_yaml, explain_config

    explained = explain_config(config, arguments, overrides)
    for line, comment in annotated_yaml(explained, with_defaults=not only_set):
        echo(line, dim="" if plain else comment)
    for sentence in advice(explained.config):
        echo(f"note: {sentence}", fg=typer.colors.YELLOW, err=True)
    return explained.config


def train(config: ConfigFile, arguments: Arguments = None, print_only: Print = False) -> None:
    """Train a model.

    Stage 1 is supervised; stage 2, rollout matching, if custom.trainer_variant is set.

    To continue after an interruption, set training.resume_from_checkpoint: true in the YAML and run the same command.
    """
    from coordexp.config import load_config
    from coordexp.config.checks import check_paths

    given = tuple(arguments or ())
    if print_only:
        print_config(config, given)
        return
    run = load_config(config, arguments=given)  # before the import of torch: a mistake in the YAML shows at once
    resume = run.training.resume_from_checkpoint
    check_paths(
        {"model.model": run.model.model},
        run.custom.data_paths,
        {"training.resume_from_checkpoint": resume} if isinstance(resume, str) else {},
    )
    from coordexp.checkpoints.fetch import with_model_here
    from coordexp.runs.start import decide_start

    run = with_model_here(run)
    console = open_console()
    model, records = None, {}
    if distributed.world_size() == 1:  # checks without torch go first: its import takes seconds
        from coordexp.checkpoints.run_folder import check_not_running

        custom = run.custom
        check_not_running(Path(run.training.output_dir))
        datasets = [(file.path, custom.train_sample_limit) for file in custom.train_jsonl]
        model, records = checked_inputs(run.model.model, [*datasets, (custom.val_jsonl, custom.val_sample_limit)])
    start = decide_start(run, records, model)
    with heavy_imports():
        from coordexp.training.run import run_training

    no_bars_in_log_files()
    run_training(start.config, console, run.custom.trainer_variant or "stage 1", config, given, start=start)
    console.print(f"saved to {run.training.output_dir}", soft_wrap=True)


def demo(
    out: Annotated[Path, typer.Option(help="Folder of the figures, pictures and checkpoints.")] = Path("outputs/demo"),
) -> None:
    """Train a tiny detector on this CPU and show the result."""
    distributed.be_alone()
    from coordexp.cli.demo import run_demo

    run_demo(out, open_console())


def init(
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="A JSONL, or the folder that coordexp data convert wrote.")
    ],
    model: Annotated[Path, typer.Option(help="The checkpoint to start from; it has the coordinate tokens.")],
    stage: Annotated[int, typer.Option(min=1, max=2, help="1: supervised; 2: rollout matching.")] = 1,
    val: Annotated[Path | None, typer.Option(help="JSONL to evaluate on [val.jsonl next to DATA].")] = None,
    out: Annotated[Path | None, typer.Option(help="The YAML [stage1.yaml or stage2.yaml].")] = None,
    output_dir: Annotated[Path | None, typer.Option(help="Folder of the run [outputs/stage1 or stage2].")] = None,
    cpu: Annotated[
        bool | None, typer.Option("--cpu/--gpu", help="Where it will run [on a GPU if nvidia-smi is there].")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the YAML if it is there.")] = False,
) -> None:
    """Write a commented YAML for your data, model and machine."""
    from coordexp.data.files import check_new_file, is_same_file, write_atomically

    path = out or Path(f"stage{stage}.yaml")
    check_new_file(path, overwrite, "name another file with --out, or add --overwrite")
    model = check_checkpoint(model)
    run = output_dir or Path(f"outputs/stage{stage}")
    from coordexp.checkpoints.fingerprints import with_bases
    from coordexp.checkpoints.folder import Checkpoint

    if any(one.resolve().is_relative_to(run.resolve()) for one in with_bases(model)):
        raise ConfigError(
            f"--output-dir: {run} has the checkpoint to start from, {model}, which training would not replace; name "
            "another folder"
        )
    from coordexp.checkpoints.memory import check_memory
    from coordexp.cli.init import advice_on_stage_2, first_configuration, gpu_memory, look_at
    from coordexp.config import load_config

    at_hand = look_at(data, model, val)
    if any(one is not None and is_same_file(path, one) for one in (at_hand.train, at_hand.val)):
        raise ConfigError(f"{path}: is the dataset, which the YAML would replace; name another file with --out")
    memory = None if cpu else gpu_memory(assume_one=cpu is not None)
    text = first_configuration(at_hand, model, 2 if stage == 2 else 1, run, memory)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)
    config = load_config(path)
    start = Checkpoint.open(model)
    adapters, needed = config.tuner.train_type == "lora", check_memory(config, checkpoint=start)
    console = open_console()
    say(
        console,
        f"wrote {path}: {at_hand.images} images, {at_hand.classes} classes, on "
        f"{'the CPU' if memory is None else f'a GPU of {memory / 1e9:.0f} GB'}, training "
        f"{'adapters (LoRA)' if adapters else 'all weights'}; memory: {needed}",
    )
    for note in at_hand.notes:
        say(console, f"note: {note}")
    try:
        check_memory(config, gpu_bytes=memory, checkpoint=start)  # warns if it is tight
    except ConfigError as error:
        say(console, f"note: training on that GPU would be refused: {error}")
    if stage == 2:
        say(console, f"note: {advice_on_stage_2(model)}")
    if at_hand.val is None:
        say(console, "note: nothing is evaluated; coordexp data split makes a val set, which --val names")
    say(console, f"next: coordexp train {shlex.quote(str(path))}")


config_app = App("Check, explain and compare configurations.")


@config_app.add(
    "check", "coordexp config check stage1.yaml training.max_steps=3", "coordexp config check stage1.yaml --only-set"
)
def config_check_command(
    config: ConfigFile,
    arguments: Arguments = None,
    plain: Annotated[bool, typer.Option("--plain", help="Print the resolved YAML alone, without sources.")] = False,
    only_set: Annotated[bool, typer.Option("--only-set", help="Leave out defaults.")] = False,
) -> None:
    """Validate a configuration and print it in full.

    Each value has its file and line, or "default". The output is YAML that loads back to the same run, with or without
    --plain. On stderr: an estimate of the GPU memory of each trainer process, if the model is there; with fsdp or
    deepspeed, of as many as launch.learner_devices names, or else of 8. Packages that training would need, and that are
    not installed here, are an error.
    """
    from coordexp.config import load_config
    from coordexp.config.environment import SCHEDULES_WITH_ARGUMENTS, check_training_environment

    loaded = load_config(config, arguments=tuple(arguments or ()))
    check_training_environment(loaded)
    training = loaded.training
    if training.lr_scheduler_kwargs or training.lr_scheduler_type in SCHEDULES_WITH_ARGUMENTS:
        with heavy_imports():
            from coordexp.training.optimizer import check_schedule

        check_schedule(training)
    run = print_config(config, arguments or (), plain, only_set)
    if Path(run.model.model).is_dir():
        from coordexp.checkpoints.memory import check_memory

        # Sharded, a process needs less the more of them there are; torchrun alone knows how many it will start.
        shards = run.fsdp.enabled or run.deepspeed.enabled
        processes = len(run.launch.learner_devices) or (_SHARDS if shards else 1)
        try:
            estimate = str(check_memory(run, processes)) + (f", of {processes}" if shards else "")
        except CheckpointError as error:
            estimate = f"no estimate: {error}"
        echo(f"memory: {estimate}", err=True)


@config_app.add("schema", "coordexp config schema > coordexp.schema.json")
def config_schema_command() -> None:
    """Print the JSON Schema for editors."""
    from coordexp.config.from_yaml import json_schema_text

    echo(json_schema_text(), nl=False)


@config_app.add("diff", "coordexp config diff stage1.yaml outputs/stage1/resolved_config.yaml")
def config_diff_command(
    left: Annotated[Path, typer.Argument(metavar="A.yaml", help="One configuration.")],
    right: Annotated[Path, typer.Argument(metavar="B.yaml", help="The other.")],
) -> None:
    """Compare two resolved configurations key by key.

    Exits with 1 if they differ, else with 0.
    """
    from coordexp.config.from_yaml import differences, explain_config

    changes = list(differences(explain_config(left), explain_config(right)))
    for path, was, becomes in changes:
        echo(path)
        for sign, side in (("-", was), ("+", becomes)):
            value, source = side or ("(no such entry)", "")
            echo(f"  {sign} {value}", dim=f"  # {source}" if source else "")
    if changes:
        raise typer.Exit(1)
