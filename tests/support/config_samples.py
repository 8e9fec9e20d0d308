"""Small valid configurations as plain mappings, and a way to write one to a file. Torch-free."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from coordexp.config.source import YAMLDumper


def module(name: str, **config: Any) -> dict[str, Any]:
    return {"name": name, "enabled": True, "weight": 1.0, "channels": ["A", "B"], "config": config}


def pipeline() -> dict[str, Any]:
    return {
        "objective": [
            module("token_ce", struct_ce_weight=1.0, desc_ce_weight=1.0, rollout_fn_desc_weight=0.0),
            module(
                "coord_reg",
                coord_ce_weight=0.0,
                soft_ce_weight=1.0,
                w1_weight=1.0,
                coord_gate_weight=1.0,
                text_gate_weight=0.0,
                temperature=1.0,
                target_sigma=2.0,
                target_truncate=None,
            ),
            module("bbox_geo", smoothl1_weight=1.0, ciou_weight=1.0),
        ],
        "diagnostics": [module("coord_diag")],
    }


def stage1() -> dict[str, Any]:
    return {
        "model": {"model": "checkpoints/tiny"},
        "custom": {"train_jsonl": "data/train.jsonl"},
        "training": {"output_dir": "outputs/run"},
        "global_max_length": 2048,
    }


def stage2(**rollout_matching: Any) -> dict[str, Any]:
    config = stage1()
    config["custom"]["trainer_variant"] = "stage2_rollout_aligned"
    config["rollout_matching"] = {"rollout_backend": "hf", "pipeline": pipeline(), **rollout_matching}
    return config


def two_channel(b_ratio: float = 0.5, **rollout_matching: Any) -> dict[str, Any]:
    config = stage1()
    config["custom"]["trainer_variant"] = "stage2_two_channel"
    config["stage2_ab"] = {"schedule": {"b_ratio": b_ratio}, "pipeline": pipeline()}
    config["rollout_matching"] = {"rollout_backend": "hf", **rollout_matching}
    return config


def _place(config: dict[str, Any], path: str) -> tuple[Any, Any]:
    """The mapping or list that holds ``path`` (``a.b[0].c``), and the last key; mappings on the way are created."""
    *parts, last = [
        int(part) if part.isdigit() else part for part in path.replace("]", "").replace("[", ".").split(".")
    ]
    here: Any = config
    part: Any
    for part in parts:
        here = here[part] if isinstance(here, list) else here.setdefault(part, {})
    return here, last


def set_key(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of ``config`` with ``path`` (``a.b[0].c``) set; mappings on the way are created."""
    config = copy.deepcopy(config)
    holder, last = _place(config, path)
    holder[last] = value
    return config


def set_keys(config: dict[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in keys.items():
        config = set_key(config, key.replace("__", "."), value)
    return config


def edit_json(path: Path, **keys: Any) -> None:
    """Set dotted ``keys`` (``__`` for the dot) in a JSON file."""
    path.write_text(json.dumps(set_keys(json.loads(path.read_text()), keys)))


def drop_key(config: dict[str, Any], path: str) -> dict[str, Any]:
    config = copy.deepcopy(config)
    holder, last = _place(config, path)
    del holder[last]
    return config


def write_yaml(folder: Path, config: dict[str, Any], name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.dump(config, Dumper=YAMLDumper, sort_keys=False), encoding="utf-8")
    return path
