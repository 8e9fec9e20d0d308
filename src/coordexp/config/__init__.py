"""The YAML contract: typed, strict, torch-free. ``load_config(path)`` is the only way in."""

from coordexp.config.data import CoordSoftCEW1Config, CustomConfig, DataConfig
from coordexp.config.load import load_config, parse_config, resolved_yaml
from coordexp.config.model import ModelConfig, TemplateConfig
from coordexp.config.objective import (
    BBoxGeoConfig,
    BBoxGeoSpec,
    CoordDiagConfig,
    CoordDiagSpec,
    CoordRegConfig,
    CoordRegSpec,
    ModuleSpec,
    PipelineConfig,
    TokenCEConfig,
    TokenCESpec,
)
from coordexp.config.rollout import DecodingConfig, RolloutMatchingConfig, VLLMConfig
from coordexp.config.root import RunConfig, check_world_size
from coordexp.config.training import TrainingConfig
from coordexp.errors import ConfigError

__all__ = [
    "BBoxGeoConfig",
    "BBoxGeoSpec",
    "ConfigError",
    "CoordDiagConfig",
    "CoordDiagSpec",
    "CoordRegConfig",
    "CoordRegSpec",
    "CoordSoftCEW1Config",
    "CustomConfig",
    "DataConfig",
    "DecodingConfig",
    "ModelConfig",
    "ModuleSpec",
    "PipelineConfig",
    "RolloutMatchingConfig",
    "RunConfig",
    "TemplateConfig",
    "TokenCEConfig",
    "TokenCESpec",
    "TrainingConfig",
    "VLLMConfig",
    "check_world_size",
    "load_config",
    "parse_config",
    "resolved_yaml",
]
