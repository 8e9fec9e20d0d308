"""Properties of every rollout backend, and how one is chosen."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coordexp.config import parse_config, resolved_rollout
from coordexp.config.resolved import AnswerConfig
from coordexp.config.rollout import RolloutMatchingConfig, SyncConfig
from coordexp.data.files import asset
from coordexp.data.images import open_rgb
from coordexp.engine.trainer.backends import check_backend
from coordexp.engine.trainer.colocated import ColocatedBackend
from coordexp.engine.trainer.server_backend import check_servers
from coordexp.engine.wire.arguments import (
    CLASS_NAMES_PROCESSOR,
    CLASS_NAMES_STATUS,
    DRAFTER,
    GUARD_PROCESSOR,
    KNOWN_TOKENS_PROCESSOR,
    section_arguments,
    settings_of,
)
from coordexp.engine.wire.engine_process import has_gpu
from coordexp.errors import RolloutError
from coordexp.inference.asking import ONE_ANSWER
from coordexp.inference.session import evaluation_config, inference_config
from coordexp.modeling.load import LoadedModel
from coordexp.modeling.trainer_weights import TrainerWeights
from coordexp.records import Rollout
from coordexp.rollouts import build_backend
from coordexp.rollouts.backend import (
    AdapterWeights,
    DecodingOptions,
    IndexedRollout,
    TrainerParts,
    collect_in_order,
    decoding_options,
)
from coordexp.rollouts.hf import HFBackend
from support.config_samples import stage2
from support.fake_servers import FakeRolloutServer
from support.fused_model import FakeWeights
from support.installed import needs
from support.tiny_run import tiny_checkpoint


@given(st.permutations(range(5)))
def test_answers_are_returned_in_the_order_of_their_requests(order: list[int]) -> None:
    rollouts = [Rollout(f"s{index}", (), (index,), "", truncated=False) for index in range(5)]
    told: list[int] = []
    answered = iter([IndexedRollout(0, index, rollouts[index]) for index in order])
    assert collect_in_order(answered, told.append) == rollouts and told == [1, 2, 3, 4, 5]


def test_class_names_are_applied_before_the_guard(loaded: LoadedModel) -> None:
    every_token = {"skip_forced_tokens": False}
    guarded = resolved(rollout_backend="vllm", repeat_terminate={"enabled": True}, decoding=every_token)
    backend = build_backend(guarded, parts(loaded), ["cat"])
    assert isinstance(backend, ColocatedBackend)
    arguments = backend.engine_arguments
    assert arguments["logits_processors"] == [KNOWN_TOKENS_PROCESSOR, CLASS_NAMES_PROCESSOR, GUARD_PROCESSOR]


@pytest.mark.parametrize(
    ("workers", "refused"), [([True, True], False), ([True, False], True), ([None], True), (None, True)]
)
def test_server_without_class_names_is_refused(workers: list[bool | None] | None, refused: bool) -> None:
    """Before a model is loaded; ``workers``: None is a server without /status/."""
    says = (
        None if workers is None else {"workers": [{} if one is None else {CLASS_NAMES_STATUS: one} for one in workers]}
    )
    raised = pytest.raises(RolloutError, match="closed_names: true") if refused else nullcontext()
    with FakeRolloutServer(world_size=2, status=says) as server, raised:
        check_servers(served_by(server), 1, with_class_names=True)


@pytest.mark.parametrize(
    ("other", "refused"),
    [
        ({}, False),
        ({"text_config.rms_norm_eps": 1e-5}, True),
        ({"vision_config.deepstack_visual_indexes": [0]}, True),
        ({"image_processor.image_mean": [0.485, 0.5, 0.5]}, True),
    ],
)
def test_server_that_applies_weights_or_normalises_images_otherwise_is_refused(
    loaded: LoadedModel, other: dict[str, Any], refused: bool
) -> None:
    """A push would fit and its checksum agree, and every answer be another model's."""
    worker = {"settings": settings_of(tiny_checkpoint()) | other}
    with FakeRolloutServer(world_size=1, status={"workers": [worker]}) as server:
        names_it = pytest.raises(RolloutError, match=f"its {next(iter(other), '')} is .*start the server")
        with names_it if refused else nullcontext():
            build_backend(served_by(server), parts(loaded))


def test_a_server_that_does_not_report_its_settings_is_a_warning(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeRolloutServer(world_size=1, status={"workers": [{}]}) as server:
        build_backend(served_by(server), parts(loaded))
    assert "does not report settings" in caplog.text


DEMO, BY_KEY = asset("checkpoints/demo-stage1"), "rollout_matching.rollout_backend=vllm"


@needs("vllm")
@pytest.mark.parametrize("command", ["predict by option", "predict by key", "evaluate"])
def test_an_engine_per_process_for_a_checkpoint_alone(command: str) -> None:
    keys = ["global_max_length=512", "rollout_matching.vllm.engine_args.max_num_seqs=3"]
    if command == "evaluate":
        config = AnswerConfig.of_run(evaluation_config(DEMO, Path("val.jsonl"), [*keys, BY_KEY]))
    elif command == "predict by key":
        config = inference_config(DEMO, [*keys, BY_KEY])
    else:
        config = inference_config(DEMO, keys, backend="vllm")
    engine = config.rollout_matching.vllm
    check_backend(config.rollout_matching)
    assert (engine.tensor_parallel_size, engine.max_model_len, engine.dtype) == (1, 512, "float32")
    assert (engine.enforce_eager, engine.given_args) == (not has_gpu(), {"max_num_seqs": 3})
    assert section_arguments(engine, gpu=False)["max_model_len"] == 512


def test_answers_depend_on_the_number_types_of_their_engine() -> None:
    """So a resumed prediction with others is refused."""

    def settings(*words: str) -> dict[str, Any]:
        keys = [f"rollout_matching.vllm.{word}" for word in words]
        return ONE_ANSWER.settings(inference_config(DEMO, keys, backend="vllm"))

    own = settings()
    assert settings("dtype=float32", "engine_args={kv_cache_dtype: auto}") == own
    assert settings("dtype=bfloat16") == own | {"vllm.dtype": "bfloat16"}
    assert settings("engine_args={kv_cache_dtype: fp8}") == own | {"vllm.engine_args.kv_cache_dtype": "fp8"}


@pytest.mark.parametrize("falls_back", [False, True])
def test_an_adapter_that_engines_would_ignore_is_refused_before_one_starts(
    loaded: LoadedModel, falls_back: bool
) -> None:
    config = resolved(rollout_backend="vllm", vllm={"enable_lora": True})
    sync = SyncConfig(mode="adapter", fallback_to_full=falls_back)
    config = config.model_copy(update={"vllm": config.vllm.model_copy(update={"sync": sync})})
    adapter = AdapterWeights({"r": 4}, (("a", torch.zeros(2)),), tiny_checkpoint(), outside_llm=True)
    trainer = replace(parts(loaded), weights=FakeWeights(adapter))
    with nullcontext() if falls_back else pytest.raises(RolloutError, match="reaches the vision tower"):
        build_backend(config, trainer)


def section(**keys: Any) -> RolloutMatchingConfig:
    return RolloutMatchingConfig.model_validate(stage2()["rollout_matching"] | keys)


def resolved(**keys: Any) -> RolloutMatchingConfig:
    """As a run hands it to backends: nulls and ``auto`` settled."""
    config = stage2()
    config["rollout_matching"] |= keys
    config["model"]["dtype"] = "float32"
    config["global_max_length"] = 640
    config["tuner"] = {"lora_rank": 16}
    return resolved_rollout(parse_config(config))


def served_by(server: FakeRolloutServer) -> RolloutMatchingConfig:
    entry = {"base_url": server.url, "group_port": 51216}
    return resolved(rollout_backend="vllm", vllm={"mode": "server", "server": {"servers": [entry]}})


def test_every_decoding_key_becomes_an_option() -> None:
    sampling = {"temperature": 0.4, "top_p": 0.5, "top_k": 6}
    config = section(max_new_tokens=7, num_beams=3, decode_mode="beam", repetition_penalty=1.5, decoding=sampling)
    assert decoding_options(config) == DecodingOptions(7, 0.4, 0.5, 6, 3, 1.5)


def parts(loaded: LoadedModel) -> TrainerParts:
    return TrainerParts(
        model=loaded.model, vocab=loaded.vocab, image_token_id=loaded.image_token_id,
        weights=TrainerWeights(loaded.model), checkpoint=tiny_checkpoint(), open_image=open_rgb,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("on_gpu", "keys", "skips"),
    [
        (False, {}, True),
        (False, {"decoding": {"skip_forced_tokens": False}}, False),
        # Samples would depend on the cache, so that a seed alone no longer decides them.
        (False, {"decoding": {"temperature": 0.5}}, False),
        (False, {"decoding": {"temperature": 0.5, "skip_forced_tokens": True}}, True),
        (False, {"vllm": {"engine_args": {"async_scheduling": True}}}, False),
        (False, {"vllm": {"engine_args": {"async_scheduling": False}}}, True),
        (False, {"rollout_backend": "hf"}, True),
        (False, {"rollout_backend": "hf", "decoding": {"temperature": 0.5}}, True),
        (False, {"rollout_backend": "hf", "decoding": {"skip_forced_tokens": False}}, False),
        (False, {"rollout_backend": "hf", "decode_mode": "beam", "num_beams": 2}, False),
        # On GPUs engines skip them for up to eight answers at once.
        (True, {"decode_batch_size": 8}, True),
        (True, {"decode_batch_size": 9}, False),
        (True, {"decode_batch_size": 32, "decoding": {"skip_forced_tokens": True}}, True),
        (True, {"decode_batch_size": 8, "decoding": {"skip_forced_tokens": False}}, False),
        (True, {"decode_batch_size": 32, "rollout_backend": "hf"}, True),
    ],
    ids=str,
)
def test_forced_tokens_are_skipped_where_that_changes_no_answer_and_is_faster(
    on_gpu: bool, keys: dict[str, Any], skips: bool
) -> None:
    assert resolved(**{"rollout_backend": "vllm", **keys}).skips_forced_tokens(on_gpu=on_gpu) is skips


def test_hf_backend_is_built_from_the_section(loaded: LoadedModel) -> None:
    config = section(decode_batch_size=5, max_new_tokens=3)
    check_backend(config)
    backend = build_backend(config, parts(loaded))
    assert isinstance(backend, HFBackend)
    report = backend.last_report()
    assert (report["decode_batch_size"], report["decoding"]) == (5, asdict(decoding_options(config)))


def test_colocated_engine_has_the_contracts_defaults(loaded: LoadedModel) -> None:
    """Conservative on four GPUs: 0.45 of their memory, one model over the four."""
    backend = build_backend(resolved(rollout_backend="vllm", decode_batch_size=3), parts(loaded))
    assert isinstance(backend, ColocatedBackend)
    arguments = backend.engine_arguments
    assert (arguments["gpu_memory_utilization"], arguments["tensor_parallel_size"]) == (0.45, 4)
    assert (arguments["dtype"], arguments["max_model_len"], arguments["model"]) == (
        "float32", 640, str(tiny_checkpoint()),
    )  # fmt: skip
    assert arguments["max_num_seqs"] == 12  # decode_batch_size for each device
    assert arguments["enable_prefix_caching"] and not arguments["enable_sleep_mode"]
    assert not {"enable_lora", "kv_cache_dtype"} & arguments.keys()
    assert arguments["speculative_config"]["model"] == DRAFTER and "logits_processors" not in arguments
    backend.close()  # nothing was started


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"gpu_memory_utilization": 0.2}, {"gpu_memory_utilization": 0.2}),
        ({"max_model_len": 700, "dtype": "bfloat16"}, {"max_model_len": 700, "dtype": "bfloat16"}),
        ({"enable_lora": True}, {"enable_lora": True, "max_lora_rank": 16, "max_loras": 1}),
        ({"enable_lora": True, "max_lora_rank": 64}, {"max_lora_rank": 64}),
        ({"engine_args": {"max_num_seqs": 5}}, {"max_num_seqs": 5}),
        ({"engine_args": {"max_num_seqs": 500}}, {"max_num_seqs": 12}),
        ({"engine_args": {"max_num_batched_tokens": 4096}}, {"max_num_batched_tokens": 4096}),
        ({"engine_args": {"async_scheduling": False}}, {"async_scheduling": False}),
        ({"engine_args": {"async_scheduling": True}},
         {"async_scheduling": True, "logits_processors": [KNOWN_TOKENS_PROCESSOR]}),
        ({}, {"disable_custom_all_reduce": True, "enable_prefix_caching": True}),
        ({"engine_args": {"enable_prefix_caching": False}}, {"enable_prefix_caching": False}),
        ({"engine_args": {"kv_cache_dtype": "fp8", "block_size": None}}, {"kv_cache_dtype": "fp8"}),
        ({"sleep_level": 1}, {"enable_sleep_mode": has_gpu()}),  # refused by vLLM on a CPU
        ({"enforce_eager": True, "engine_args": {"cpu_offload_gb": 2}}, {"enforce_eager": True, "cpu_offload_gb": 2}),
        ({"engine_args": {"mm_encoder_tp_mode": "data"}},
         {"mm_encoder_tp_mode": "data", "limit_mm_per_prompt": {"image": 1, "video": 0}}),
    ],
    ids=str,
)  # fmt: skip
def test_every_engine_key_reaches_the_engine(
    keys: dict[str, Any], expected: dict[str, Any], loaded: LoadedModel
) -> None:
    backend = build_backend(resolved(rollout_backend="vllm", decode_batch_size=3, vllm=keys), parts(loaded))
    assert isinstance(backend, ColocatedBackend)
    arguments = backend.engine_arguments
    assert {name: arguments[name] for name in expected} == expected
