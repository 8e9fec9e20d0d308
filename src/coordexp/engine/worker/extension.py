"""The worker extension: methods that vLLM adds to its worker class (``worker_extension_cls``) in all of our engines."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import coordexp.engine.worker.cpu_patches  # noqa: F401  # applies them, before the engine loads its model
from coordexp.engine.wire.arguments import (
    ADAPTER_ID,
    CLASS_NAMES_STATUS,
    ENGINE,
    FAILURE,
    RESULT,
    SETTINGS,
    pushed_adapter,
    settings_of,
)
from coordexp.engine.wire.engine_process import DIE_WITH_PARENT, die_with_owner, die_with_parent
from coordexp.engine.worker import drafting
from coordexp.engine.worker.drafting import guard_report, processor_of
from coordexp.engine.worker.logits_processors import (
    KnownTokensProcessor,
    RepeatTerminateProcessor,
    RequestClassNamesProcessor,
)
from coordexp.errors import RolloutError
from coordexp.modeling.finite import broken_weight
from coordexp.weight_sync.group import GroupAddress
from coordexp.weight_sync.receiver import WeightReceiver

drafting.install()  # before vLLM's model runner samples

logger = logging.getLogger(__name__)


class WeightSyncExtension:
    """Methods that ``collective_rpc`` calls by name; arguments and results are plain JSON values."""

    # Attributes of vLLM's worker, into which this class is mixed.
    model_runner: Any
    device: torch.device
    vllm_config: Any
    _weight_receiver: WeightReceiver | None = None

    # Not __init__, which is that of vLLM's worker.
    def __new__(cls, *args: Any, **kwargs: Any) -> WeightSyncExtension:
        if os.environ.get(DIE_WITH_PARENT) == "1":
            die_with_parent()
        die_with_owner()
        return super().__new__(cls)

    @property
    def engine_model(self) -> torch.nn.Module:
        """The engine's model. With CUDA graphs ``model_runner.model`` is a wrapper around it, and not a module."""
        return self.model_runner.get_model()

    @property
    def receiver(self) -> WeightReceiver:
        """This worker's receiver of weights; created at its first use, after the model is loaded."""
        if self._weight_receiver is None:
            sharded = self.vllm_config.parallel_config.world_size > 1
            self._weight_receiver = WeightReceiver(self.engine_model, torch.device(self.device), sharded=sharded)
        return self._weight_receiver

    def init_communicator(
        self,
        host: str,
        port: int,
        world_size: int,
        first_rank: int | None = None,
        timeout_s: float = 120.0,
        token: str = "",
        listen_host: str = "",
        trainer: str = "",
    ) -> None:
        """Join a weight group (see :class:`GroupAddress`); its last member is the ``trainer``. ``first_rank``: rank of
        this engine's first worker, by default computed from its data-parallel rank."""
        from vllm.distributed.parallel_state import get_world_group

        if first_rank is None:
            parallel = self.vllm_config.parallel_config
            first_rank = int(parallel.data_parallel_index) * int(parallel.tensor_parallel_size)
        rank = first_rank + get_world_group().rank
        self.receiver.open(GroupAddress(host, port, rank, world_size, timeout_s, token, listen_host), trainer)

    def close_communicator(self) -> None:
        self.receiver.close()

    def coordexp_owner(self) -> str | None:
        return self.receiver.owner

    def coordexp_problem(self) -> str | None:
        return self.receiver.problem

    def update_flattened_params(self, metadatas: list[dict[str, Any]]) -> None:
        """Receive one bucket of full weights, under the checkpoint's tensor names."""
        self.receiver.receive(metadatas)

    def update_named_param(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        size = torch.Size(shape).numel() * getattr(torch, dtype.removeprefix("torch.")).itemsize
        bucket = {"name": name, "shape": list(shape), "dtype": dtype, "start_idx": 0, "end_idx": size, "numel": size}
        self.receiver.receive([bucket])

    def update_adapter_flattened_param(self, peft_config: dict[str, Any], metadatas: list[dict[str, Any]]) -> None:
        """Receive a LoRA adapter under PEFT's names; it replaces the previous one."""
        self._take_adapter(peft_config, self.receiver.receive_adapter(metadatas))

    def take_adapter(self, peft_config: Mapping[str, Any], tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Replace the LoRA adapter by one from this process's memory; ``tensors`` are not changed."""
        # Copies, because vLLM multiplies the adapter's scale into its tensors in place, and these are the trainer's.
        self._take_adapter(peft_config, [(name, tensor.clone()) for name, tensor in tensors])

    def process_weights_after_loading(
        self, weight_version: int | None = None, wants_checksum: bool = False, trainer_id: str | None = None
    ) -> dict[str, Any]:
        """Commit the push; see :meth:`WeightReceiver.commit`."""
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        def finish() -> None:
            if self.receiver.state.shapes:
                process_weights_after_loading(self.engine_model, self.model_runner.model_config, self.device)
            has_adapter = self.vllm_config.lora_config is not None and ADAPTER_ID in self.model_runner.list_loras()
            if has_adapter and not self.receiver.state.adapter_names:
                self.model_runner.remove_lora(ADAPTER_ID)  # merged weights already contain it

        return self.receiver.commit(weight_version, wants_checksum, finish, trainer_id)

    def get_state_keys(self) -> list[str]:
        return list(self.receiver.layout.parameters)

    def coordexp_call(self, method: str, args: Sequence[Any]) -> dict[str, Any]:
        """Call ``method``. Returns its result, or the text of its error, which vLLM would otherwise hide in its own
        message."""
        try:
            return {RESULT: getattr(self, method)(*args)}
        except Exception as error:  # the edge of this process: the server reports it
            logger.exception("%s failed", method)
            # vLLM raises assertions without a message where sizes do not fit.
            return {FAILURE: str(error).strip() or f"{type(error).__name__}; is this the trainer's model?"}

    def coordexp_broken_weight(self) -> str | None:
        """As :func:`~coordexp.modeling.finite.broken_weight`, under vLLM's name."""
        return broken_weight(self.engine_model)

    def coordexp_beat(self) -> int:
        """Heartbeat: number of positions, accepted drafts or not, that this worker has sampled at since its start."""
        known_tokens = processor_of(self, KnownTokensProcessor)
        return 0 if known_tokens is None else known_tokens.num_sampled

    def coordexp_status(self) -> dict[str, Any]:
        runner = type(self.model_runner)
        known_tokens = processor_of(self, KnownTokensProcessor)
        on_gpu = torch.device(self.device).type == "cuda"
        image = self.vllm_config.model_config.multimodal_config.limit_per_prompt.get("image")
        return {
            **self.receiver.report(),
            "pid": os.getpid(),
            "device": str(self.device),
            # The GPU's identity; its index differs between processes.
            "device_uuid": str(torch.cuda.get_device_properties(self.device).uuid) if on_gpu else None,
            "dtype": str(self.model_runner.model_config.dtype).removeprefix("torch."),
            "executor": str(self.vllm_config.parallel_config.distributed_executor_backend),
            # The image size with which vLLM profiled its memory.
            "profiled_image": None if image is None else [image.width, image.height],
            "model_runner": f"{runner.__module__}.{runner.__name__}",
            "repeat_terminate": guard_report(self),
            "num_known_tokens": None if known_tokens is None else known_tokens.num_known,
            CLASS_NAMES_STATUS: processor_of(self, RequestClassNamesProcessor) is not None,
            ENGINE: {
                "max_model_len": self.vllm_config.model_config.max_model_len,
                "dtype": str(self.model_runner.model_config.dtype).removeprefix("torch."),
                "kv_cache_dtype": self.vllm_config.cache_config.cache_dtype,
            },
            SETTINGS: settings_of(self.vllm_config.model_config.model),
        }

    def coordexp_pop_triggers(self, request_ids: Sequence[str]) -> list[str]:
        """Those of ``request_ids`` that the repeat guard ended; each is reported once."""
        guard = processor_of(self, RepeatTerminateProcessor)
        return [] if guard is None else list(guard.pop_triggers(request_ids))

    def _take_adapter(self, peft_config: Mapping[str, Any], tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        with self.receiver.recording_failures():
            self.receiver.begin()
            self.receiver.state.adapter_names += [name for name, _ in tensors]
            if self.vllm_config.lora_config is None:
                raise RolloutError(
                    "this engine was started without adapters; set rollout_matching.vllm.enable_lora: true and restart "
                    "the server, or push with sync.mode: full"
                )
            helper = PEFTHelper.from_dict(dict(peft_config))
            helper.validate_legal(self.vllm_config.lora_config)
            mapper = getattr(self.engine_model, "hf_to_vllm_mapper", None)
            adapter = LoRAModel.from_lora_tensors(
                ADAPTER_ID,
                dict(tensors),
                helper,
                device="cpu",
                dtype=self.vllm_config.lora_config.lora_dtype,
                weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
            )
            manager = self.model_runner.lora_manager
            # vLLM silently ignores adapters of modules that it did not wrap, such as the vision tower's.
            fused = self.receiver.layout.fused
            for module in adapter.loras:
                parent, _, last = module.rpartition(".")
                whole = f"{parent}.{fused[last][0]}" if last in fused else module
                if whole not in manager._adapter_manager.modules:
                    raise RolloutError(
                        f"the adapter changes {module}, which this engine cannot adapt: it would be ignored silently. "
                        "Push with sync.mode: full"
                    )
            manager._load_adapter = lambda _request: adapter  # vLLM itself reads adapters from disk only
            try:
                self.model_runner.add_lora(pushed_adapter(load_inplace=True))
            finally:
                del manager._load_adapter
