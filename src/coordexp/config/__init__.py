"""The YAML contract: typed, strict, torch-free. ``load_config(path)`` reads a file."""

from coordexp.config.checks import advice, check_world_size
from coordexp.config.from_yaml import load_config, parse_config, resolved_yaml
from coordexp.config.resolved import resolved_rollout, rollout_contract
from coordexp.config.schema import RunConfig
from coordexp.errors import ConfigError

__all__ = [
    "ConfigError",
    "RunConfig",
    "advice",
    "check_world_size",
    "load_config",
    "parse_config",
    "resolved_rollout",
    "resolved_yaml",
    "rollout_contract",
]
