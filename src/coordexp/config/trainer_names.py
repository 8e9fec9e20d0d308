"""The names of optimizers, schedules and loggers that ``transformers`` knows, and the packages that they need.

Copied, because asking transformers would load torch; a test compares them with the installed version.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import MappingProxyType

from coordexp.config.wording import nearest

_OPTIMIZERS = (
    "adamw_torch adamw_torch_fused adamw_torch_xla adamw_torch_npu_fused adafactor adamw_anyprecision adamw_torch_4bit "
    "adamw_torch_8bit ademamix sgd adagrad adamw_bnb_8bit adamw_8bit ademamix_8bit lion_8bit lion_32bit "
    "paged_adamw_32bit paged_adamw_8bit paged_ademamix_32bit paged_ademamix_8bit paged_lion_32bit paged_lion_8bit "
    "rmsprop rmsprop_bnb rmsprop_bnb_8bit rmsprop_bnb_32bit galore_adamw galore_adamw_8bit galore_adafactor "
    "galore_adamw_layerwise galore_adamw_8bit_layerwise galore_adafactor_layerwise lomo adalomo grokadamw "
    "schedule_free_radam schedule_free_adamw schedule_free_sgd apollo_adamw apollo_adamw_layerwise stable_adamw"
)
_SCHEDULES = (
    "linear cosine cosine_with_restarts polynomial constant constant_with_warmup inverse_sqrt reduce_lr_on_plateau "
    "cosine_with_min_lr cosine_warmup_with_min_lr warmup_stable_decay greedy"
)
OPTIMIZERS = frozenset(_OPTIMIZERS.split())
SCHEDULES = frozenset(_SCHEDULES.split())
WITH_MASTERS = ("adamw_torch", "adamw_torch_fused", "sgd")  # torch's own, which step any tensor that they are given

# Logger -> the modules without which transformers refuses it.
LOGGERS = MappingProxyType(
    {
        "azure_ml": ("azureml",),
        "comet_ml": ("comet_ml",),
        "mlflow": ("mlflow",),
        "neptune": ("neptune",),
        "tensorboard": ("tensorboard",),
        "trackio": ("trackio",),
        "wandb": ("wandb",),
        "codecarbon": ("codecarbon",),
        "clearml": ("clearml",),
        "dagshub": ("dagshub", "mlflow"),
        "flyte": ("flytekit",),
        "dvclive": ("dvclive",),
        "swanlab": ("swanlab",),
        "kubeflow": (),
    }
)
_BITSANDBYTES = "ademamix adamw_8bit adamw_bnb_8bit lion_8bit lion_32bit rmsprop_bnb rmsprop_bnb_8bit rmsprop_bnb_32bit"
_OPTIMIZER_NEEDS = {
    **dict.fromkeys([*_BITSANDBYTES.split(), "ademamix_8bit"], "bitsandbytes"),
    **dict.fromkeys((name for name in OPTIMIZERS if name.startswith("paged_")), "bitsandbytes"),
    **dict.fromkeys((name for name in OPTIMIZERS if name.startswith("galore_")), "galore_torch"),
    **dict.fromkeys((name for name in OPTIMIZERS if name.startswith("apollo_")), "apollo_torch"),
    **dict.fromkeys((name for name in OPTIMIZERS if name.startswith("schedule_free_")), "schedulefree"),
    **dict.fromkeys(("adamw_torch_4bit", "adamw_torch_8bit"), "torchao"),
    **dict.fromkeys(("lomo", "adalomo"), "lomo_optim"),
    "grokadamw": "grokadamw",
    "stable_adamw": "optimi",
    "adamw_anyprecision": "torchdistx",
}


def one_of(names: frozenset[str], what: str) -> Callable[[str], str]:
    """A validator that lets only ``names`` through."""

    def check(name: str) -> str:
        if name in names:
            return name
        guess = nearest(name, sorted(names))
        hint = f"did you mean '{guess}'?" if guess else f"transformers knows {', '.join(sorted(names))}"
        raise ValueError(f"there is no {what} '{name}'; {hint}")

    return check


def missing_packages(optimizer: str, loggers: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """(key below ``training``, the name that stands there, the module it lacks here) of what cannot be used."""
    wanted = [("report_to", name, module) for name in loggers for module in LOGGERS.get(name, ())]
    if optimizer in _OPTIMIZER_NEEDS:
        wanted.append(("optim", optimizer, _OPTIMIZER_NEEDS[optimizer]))
    return [(key, name, module) for key, name, module in wanted if importlib.util.find_spec(module) is None]
