"""The YAML contract: typed, strict, torch-free. ``load_config(path)`` is the only way in."""

from coordexp.config.checks import advice, check_world_size
from coordexp.config.data import CoordSoftCEW1Config, CustomConfig, DataConfig
from coordexp.config.load import load_config, parse_config, resolved_yaml
from coordexp.config.model import ModelConfig, TemplateConfig, TunerConfig
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
from coordexp.config.rollout import (
    DecodingConfig,
    EvalDetectionConfig,
    MonitorDumpConfig,
    OffloadConfig,
    RepeatTerminateConfig,
    RolloutMatchingConfig,
    Stage2ABConfig,
)
from coordexp.config.root import RunConfig, resolved_rollout, rollout_contract
from coordexp.config.sections import DebugConfig
from coordexp.config.training import DeepSpeedConfig, FSDPConfig, LaunchConfig, TrainingConfig
from coordexp.config.vllm import ServerConfig, SyncConfig, VLLMConfig
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
    "DebugConfig",
    "DecodingConfig",
    "DeepSpeedConfig",
    "EvalDetectionConfig",
    "FSDPConfig",
    "LaunchConfig",
    "ModelConfig",
    "ModuleSpec",
    "MonitorDumpConfig",
    "OffloadConfig",
    "PipelineConfig",
    "RepeatTerminateConfig",
    "RolloutMatchingConfig",
    "RunConfig",
    "ServerConfig",
    "Stage2ABConfig",
    "SyncConfig",
    "TemplateConfig",
    "TokenCEConfig",
    "TokenCESpec",
    "TrainingConfig",
    "TunerConfig",
    "VLLMConfig",
    "advice",
    "check_world_size",
    "load_config",
    "parse_config",
    "resolved_rollout",
    "resolved_yaml",
    "rollout_contract",
]
