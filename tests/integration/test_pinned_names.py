"""Undocumented names of other packages exist in the pinned versions. Look here first after an upgrade.

A value lists names of the module that is its key. ``Class: text`` means that the source of Class must contain the
text, for names that exist only at run time, such as an instance's attribute or a message.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
from pathlib import Path

import pytest

from coordexp.engine.wire.versions import TESTED_VERSIONS
from support.forked import SWIFT, Handle, by_file, forked

PINNED: dict[str, dict[str, list[str]]] = {
    "vllm": {
        "vllm": ["AsyncEngineArgs", "EngineArgs", "SamplingParams"],
        # patches on CPUs
        "vllm.model_executor.layers.utils": ["dispatch_cpu_unquantized_gemm"],
        "vllm.distributed.device_communicators.shm_broadcast": ["SpinCondition", "SpinCondition: self.busy_loop_s"],
        "vllm.v1.executor.multiproc_executor": ["MultiprocExecutor"],
        "vllm.v1.executor.uniproc_executor": ["UniProcExecutor"],
        "vllm.platforms": ["current_platform"],
        # images of OpenAI requests
        "vllm.multimodal.media": ["MEDIA_CONNECTOR_REGISTRY.load", "MediaConnector.load_from_url_async"],
        "vllm.multimodal.media.connector": ["global_thread_pool"],
        "vllm.envs": ["VLLM_MEDIA_CONNECTOR"],
        # weights
        "vllm.distributed.parallel_state": ["get_world_group"],
        "vllm.distributed.device_communicators.pynccl": [
            "PyNcclCommunicator.from_unique_id_bytes",
            "PyNcclCommunicator.broadcast",
            "PyNcclCommunicator.destroy",
        ],
        "vllm.distributed.device_communicators.pynccl_wrapper": ["NCCLLibrary.ncclGetUniqueId"],
        "vllm.model_executor.model_loader.utils": ["process_weights_after_loading"],
        "vllm.model_executor.models.utils": ["WeightsMapper.get_rename_mapper", "WeightsMapper.map_name"],
        # adapters from memory
        "vllm.lora.lora_model": ["LoRAModel.from_lora_tensors"],
        "vllm.lora.peft_helper": ["PEFTHelper.from_dict"],
        "vllm.lora.worker_manager": ["WorkerLoRAManager._load_adapter"],
        "vllm.lora.request": ["LoRARequest"],
        # logits processors, the repeat guard among them
        "vllm.v1.sample.logits_processor": [
            "LogitsProcessor.apply",
            "LogitsProcessor.update_state",
            "LogitsProcessor.is_argmax_invariant",
            "LogitsProcessor.validate_params",
            "LogitsProcessors.all",
            "process_dict_updates",
        ],
        "vllm.sampling_params": ["SamplingParams.extra_args", "RequestOutputKind.FINAL_ONLY"],
        # coordexp serve
        "vllm.v1.engine.async_llm": [
            *("AsyncLLM.from_engine_args", "AsyncLLM.generate", "AsyncLLM.abort", "AsyncLLM.collective_rpc"),
            *("AsyncLLM.check_health", "AsyncLLM.shutdown", "AsyncLLM.reset_prefix_cache"),
            *("AsyncLLM.reset_encoder_cache", "AsyncLLM.reset_mm_cache"),
        ],
        "vllm.v1.worker.gpu_model_runner": ["GPUModelRunner._sample", "GPUModelRunner.get_model"],
        "vllm.v1.worker.gpu_input_batch": ["InputBatch: self.spec_token_ids"],
        "vllm.v1.sample.rejection_sampler": [
            *("expand_batch_to_tokens", "_rejection_random_sample", "apply_sampling_constraints"),
        ],
        "vllm.v1.engine.input_processor": ["InputProcessor: self.generation_config_fields", "InputProcessor.tokenizer"],
        "vllm.v1.spec_decode.metadata": ["SpecDecodeMetadata: num_draft_tokens"],
        "vllm.v1.engine.exceptions": ["EngineDeadError"],
        "vllm.exceptions": ["VLLMValidationError", "VLLMError"],
        # colocated engines
        "vllm.v1.engine.llm_engine": [
            *("LLMEngine.from_engine_args", "LLMEngine.add_request", "LLMEngine.abort_request", "LLMEngine.step"),
            *("LLMEngine.has_unfinished_requests", "LLMEngine.collective_rpc", "LLMEngine.reset_prefix_cache"),
            *("LLMEngine.reset_encoder_cache", "LLMEngine.reset_mm_cache", "LLMEngine.sleep", "LLMEngine.wake_up"),
            "LLMEngine.is_sleeping",
        ],
        "vllm.v1.engine.core_client": ["InprocClient.shutdown"],
        # coordexp doctor
        "vllm.model_executor.models.qwen3_vl": [
            *("Qwen3_VisionTransformer: self.input_norm", "Qwen3_VisionTransformer: self.patch_embed(hidden_states)"),
        ],
        "vllm.renderers.base": ["BaseRenderer.render_cmpl"],
        "vllm.renderers.inputs.preprocess": ["parse_model_prompt"],
    },
    "kernels": {
        "liger_kernel.ops": ["LigerRMSNormFunction.apply", "LigerSiLUMulFunction.apply", "LigerRopeFunction.apply"],
    },
    "swift": {
        "swift.pipelines.infer.rollout": [
            "GRPOVllmEngine",
            "chunk_list",
            *("SwiftRolloutDeploy._register_rl_rollout_app", "SwiftRolloutDeploy._require_api_key"),
            *("SwiftRolloutDeploy.lifespan", "SwiftRolloutDeploy.health", "SwiftRolloutDeploy.infer"),
            *("SwiftRolloutDeploy.init_communicator", "SwiftRolloutDeploy.process_weights_after_loading"),
            "SwiftRolloutDeploy.close_communicator",
            *("SwiftRolloutDeploy.get_world_size", "SwiftRolloutDeploy: self.connections"),
            *("SwiftRolloutDeploy: self.processes", "SwiftRolloutDeploy: self.args"),
            *("SwiftRolloutDeploy: self.num_connections", "SwiftRolloutDeploy: 'type': 'call'"),
            # messages between its HTTP process and its workers
            *("llm_worker: command['type'] in ['call'", "llm_worker: command['method']"),
            *("llm_worker: command.get('kwargs', {})", "llm_worker: connection.send(result)"),
        ],
        "swift.infer_engine": [
            *("GRPOVllmEngine._add_request", "GRPOVllmEngine.infer", "GRPOVllmEngine._get_grpo_lora_request"),
            "GRPOVllmEngine._add_stop_words",
        ],
        "swift.infer_engine.protocol": ["RolloutOutput.model_fields"],
        "swift.arguments.deploy_args": ["get_device_count"],
        "swift.utils": ["get_device_count"],
    },
    "trainer": {
        "faster_coco_eval.mask_api_new_cpp": ["toUncompressedRLE"],
        "peft.tuners.lora.layer": [
            *("LoraLayer: self.lora_A", "LoraLayer: self.lora_B", "LoraLayer: self.scaling"),
            *("LoraLayer: self.lora_magnitude_vector", "LoraLayer: self.base_layer"),
        ],
        "transformers.vision_utils": ["get_vision_interpolation_indices_and_weights", "get_vision_position_ids"],
        "transformers.models.qwen3_vl.modeling_qwen3_vl": [
            "Qwen3VLTextAttention: apply_rotary_pos_emb(query_states, key_states, cos, sin)",
            "Qwen3VLVisionAttention: apply_rotary_pos_emb_vision(query_states, key_states, cos, sin)",
            "Qwen3VLTextMLP: self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))",
            "Qwen3VLTextRMSNorm: self.variance_epsilon",
            *("Qwen3VLVisionModel: self.num_grid_per_side", "Qwen3VLVisionModel: self.interpolation_mode"),
            *("Qwen3VLVisionModel: self.interpolation_align_corners", "Qwen3VLVisionModel: self.spatial_merge_size"),
        ],
        "torch": ["UntypedStorage._cdata"],
        "torch.distributed": [
            *("ProcessGroupGloo._Options", "ProcessGroupGloo._Options._devices", "ProcessGroupGloo._Options._threads"),
            *("ProcessGroupGloo._Options._timeout", "ProcessGroupGloo.create_device", "ProcessGroupGloo.abort"),
            *("ProcessGroup._get_backend", "ProcessGroupGloo._set_default_timeout"),
        ],
        "accelerate.state": ["PartialState._shared_state"],
        "transformers.training_args": ["TrainingArguments: _n_gpu"],
        "transformers.trainer": ["OPTIMIZER_NAME", "SCALER_NAME", "SCHEDULER_NAME", "TRAINER_STATE_NAME"],
        "transformers.trainer_callback": ["CallbackHandler", "DefaultFlowCallback", "ExportableState"],
        "transformers.trainer_pt_utils": ["get_parameter_names"],
        "transformers.trainer_utils": ["PREFIX_CHECKPOINT_DIR", "align_special_tokens"],
    },
}


def problems(group: str) -> list[str]:
    return [
        f"{module}: {name}"
        for module, names in PINNED[group].items()
        for name in names
        if not is_there(importlib.import_module(module), *name.split(": ", 1))
    ]


def is_there(found: object, path: str, text: str = "") -> bool:
    for part in path.split("."):
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return not text or text in inspect.getsource(found)  # type: ignore[arg-type]


def test_the_trainers_libraries_have_every_name() -> None:
    assert problems("trainer") == []


def test_vllm_has_every_name() -> None:
    pytest.importorskip("vllm")
    assert problems("vllm") == []


def test_liger_has_every_name() -> None:
    pytest.importorskip("liger_kernel")
    assert problems("kernels") == []


def print_problems(group: str) -> None:
    print("\n".join(problems(group)))


def test_ms_swift_has_every_name(tmp_path: Path) -> None:
    """In a process of its own: ms-swift patches transformers' trainers when it is imported."""
    if importlib.util.find_spec("swift") is None:
        pytest.skip("ms-swift is not installed")
    found, errors = tmp_path / "found", tmp_path / "errors"
    code = Handle(forked(*by_file(print_problems, "swift"), log=found, err=errors, behind=SWIFT)).wait(300)
    assert (code, found.read_text().strip()) == (0, ""), errors.read_text()[-2000:]


@pytest.mark.parametrize("name", sorted(TESTED_VERSIONS))
def test_the_installed_versions_are_the_tested_ones(name: str) -> None:
    try:
        installed = importlib.metadata.version(name).split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    assert installed in TESTED_VERSIONS[name]
