"""The whole configuration of a run."""

from __future__ import annotations

from pydantic import model_validator

from coordexp.config.checks import cross_checks
from coordexp.config.sections import Sections
from coordexp.config.strict import dotted
from coordexp.errors import ConfigError


class RunConfig(Sections):
    """One run, fully determined. Sections are handed to the parts as values, never as this tree."""

    # The loader has looked for broken rules before it comes here; whoever builds a RunConfig otherwise meets them here.
    @model_validator(mode="after")
    def _sections_agree(self) -> RunConfig:
        problems = list(cross_checks(self))
        if problems:
            raise ConfigError("\n".join(f"{dotted(p.path)}: {p.message}" for p in problems))
        return self
