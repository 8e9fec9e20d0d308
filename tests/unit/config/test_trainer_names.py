"""The copied names are those of the installed transformers."""

from __future__ import annotations

from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

from coordexp.config.trainer_names import LOGGERS, OPTIMIZERS, SCHEDULES, missing_packages


def test_names_are_those_of_transformers() -> None:
    assert {name.value for name in OptimizerNames} == OPTIMIZERS
    assert {name.value for name in SchedulerType} == SCHEDULES
    assert set(INTEGRATION_TO_CALLBACK) == set(LOGGERS)


def test_what_is_always_there_lacks_nothing() -> None:
    assert missing_packages("adamw_torch", ("tensorboard", "none")) == []
    assert missing_packages("lomo", ("dagshub",))[-1] == ("optim", "lomo", "lomo_optim")
