"""One process of a distributed run: trains the given YAML and leaves what it logged, per rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console
from torch.distributed.tensor import DTensor

from coordexp.config import load_config
from coordexp.distributed import rank
from coordexp.training.run import run_training


def main(yaml: str) -> None:
    config = load_config(yaml)
    trainer = run_training(config, Console(quiet=True))
    result = {
        "steps": [line for line in trainer.state.log_history if "loss" in line],
        "evaluations": [line for line in trainer.state.log_history if "eval_rollout/f1" in line],
        "sharded": sum(isinstance(weight, DTensor) for weight in trainer.model.parameters()),
        "trained": len(trainer.step.prepared.rows) if trainer.step.prepared is not None else 0,
    }
    path = Path(config.training.output_dir) / f"rank{rank()}.json"
    path.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
