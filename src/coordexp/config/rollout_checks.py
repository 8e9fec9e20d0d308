"""The rules between keys that concern rollouts: decoding, the repeat guard, the vLLM engine and its weight pushes."""

from __future__ import annotations

from collections.abc import Iterator

from coordexp.config.rollout import RolloutMatchingConfig
from coordexp.config.sections import Sections
from coordexp.config.strict import Problem, problem
from coordexp.config.vllm import ADAPTER_RANKS, VLLMConfig

_RM = "rollout_matching"
_VLLM = f"{_RM}.vllm"


def rollout_checks(config: Sections, rollout: RolloutMatchingConfig) -> Iterator[Problem]:
    """Every rule between keys of ``rollout_matching``, and between them and others, that ``config`` breaks."""
    yield from _decoding_checks(rollout)
    if rollout.max_new_tokens >= config.global_max_length:
        yield problem(
            f"{_RM}.max_new_tokens",
            f"{rollout.max_new_tokens} leaves no room for the prompt in global_max_length "
            f"({config.global_max_length}); lower it, or raise global_max_length",
            "global_max_length",
        )
    yield from _repeat_checks(rollout)
    yield from _target_checks(config, rollout)
    if rollout.is_colocated and rollout.offload.enabled and rollout.eval_detection.score_mode == "confidence":
        yield problem(
            f"{_RM}.eval_detection.score_mode",
            "confidence needs the learner during rollouts, and offload moves it away; write score_mode: constant, or "
            "offload.enabled: false",
            f"{_RM}.offload.enabled",
            f"{_RM}.rollout_backend",
            f"{_VLLM}.mode",
        )
    if rollout.rollouts_ahead and not rollout.is_served:
        yield problem(
            f"{_RM}.rollouts_ahead",
            "1 needs engines that keep their weights while the learner changes its own: vLLM servers (rollout_backend: "
            "vllm with vllm.mode: server); without them write 0",
            f"{_RM}.rollout_backend",
            f"{_VLLM}.mode",
        )
    if rollout.rollout_backend == "vllm":
        yield from _vllm_checks(config, rollout)


def _decoding_checks(rollout: RolloutMatchingConfig) -> Iterator[Problem]:
    if rollout.decoding.top_k == 0:
        yield problem(f"{_RM}.decoding.top_k", "0 keeps no token; write -1 to keep all, or a number from 1 on")
    if rollout.decode_mode == "greedy" and rollout.num_beams > 1:
        yield problem(f"{_RM}.num_beams", "needs decode_mode: beam; greedy decoding has one beam", f"{_RM}.decode_mode")
    if rollout.decode_mode == "beam":
        if rollout.num_beams < 2:
            yield problem(f"{_RM}.num_beams", "decode_mode: beam needs at least 2", f"{_RM}.decode_mode")
        if rollout.decoding.temperature > 0:
            yield problem(
                f"{_RM}.decoding.temperature",
                "decode_mode: beam does not sample; set the temperature to 0",
                f"{_RM}.decode_mode",
            )
        if rollout.rollout_backend == "vllm":
            yield problem(
                f"{_RM}.decode_mode",
                "beam search needs rollout_backend: hf; with vllm write decode_mode: greedy",
                f"{_RM}.rollout_backend",
            )


def _target_checks(config: Sections, rollout: RolloutMatchingConfig) -> Iterator[Problem]:
    target, section = rollout.target, f"{_RM}.target"
    if target.soft_threshold != 0.5 and target.unmatched != "soft":
        yield problem(
            f"{section}.soft_threshold", "has no effect without target.unmatched: soft", f"{section}.unmatched"
        )
    if target.answer == "rewritten" and target.unmatched == "drop" and target.complete_above is not None:
        yield problem(
            f"{section}.complete_above",
            "decides when to leave out what is unmatched, which unmatched: drop does at every step; remove one of them",
            f"{section}.unmatched",
        )
    if target.unmatched == "soft" and (config.fsdp.enabled or config.deepspeed.enabled):
        yield problem(
            f"{section}.unmatched",
            "soft asks the learner, on each rank for its own answers, how sure it is, which sharded weights do not "
            "allow; write mask, or train without fsdp and deepspeed",
            "fsdp.enabled",
            "deepspeed.enabled",
        )
    if target.answer == "rewritten":
        return
    defaults = {"unmatched": "mask", "complete_above": None, "duplicates": "keep", "missed": "append"}
    for key, default in defaults.items():
        if getattr(target, key) != default:
            yield problem(
                f"{section}.{key}",
                "concerns rewritten answers alone; write target.answer: rewritten, or leave it at "
                f"{'null' if default is None else default}",
                f"{section}.answer",
            )


def _repeat_checks(rollout: RolloutMatchingConfig) -> Iterator[Problem]:
    guard, section = rollout.repeat_terminate, f"{_RM}.repeat_terminate"
    if guard.max_consecutive_token_repeats == 1:
        yield problem(
            f"{section}.max_consecutive_token_repeats", "1 would end every answer; write 0 (not checked) or at least 2"
        )
    if guard.ngram_repeats == 1:
        yield problem(f"{section}.ngram_repeats", "1 would end every answer; write 0 (not checked) or at least 2")
    ngrams = guard.ngram_size > 0 and guard.ngram_repeats > 0
    if (guard.ngram_size > 0) != (guard.ngram_repeats > 0):
        off = "ngram_size" if guard.ngram_size == 0 else "ngram_repeats"
        yield problem(
            f"{section}.{off}",
            "is 0 while its partner is not: patterns are checked by ngram_size and ngram_repeats together",
            f"{section}.ngram_size",
            f"{section}.ngram_repeats",
        )
    if guard.enabled and not (guard.max_consecutive_token_repeats or ngrams or guard.max_object_keys):
        yield problem(
            f"{section}.enabled",
            "no threshold is set, so nothing would ever be ended; set one, or enabled: false",
            f"{section}.max_consecutive_token_repeats",
            f"{section}.ngram_size",
            f"{section}.ngram_repeats",
            f"{section}.max_object_keys",
        )


def _vllm_checks(config: Sections, rollout: RolloutMatchingConfig) -> Iterator[Problem]:
    vllm, backend = rollout.vllm, f"{_RM}.rollout_backend"
    if vllm.mode == "server" and vllm.server is None:
        yield problem(
            f"{_VLLM}.server",
            "missing; mode: server needs server.servers[] with base_url and group_port of each. Without servers write "
            "vllm.mode: colocate or rollout_backend: hf",
            f"{_VLLM}.mode",
            backend,
        )
    if vllm.max_model_len is not None:
        if rollout.max_new_tokens >= vllm.max_model_len:
            yield problem(
                f"{_RM}.max_new_tokens",
                f"{rollout.max_new_tokens} leaves no room for the prompt in vllm.max_model_len ({vllm.max_model_len}); "
                "lower it, or raise max_model_len",
                f"{_VLLM}.max_model_len",
                backend,
            )
        if vllm.max_model_len < config.global_max_length:
            yield problem(
                f"{_VLLM}.max_model_len",
                f"{vllm.max_model_len} is less than global_max_length ({config.global_max_length}), which samples may "
                "reach; raise it, or remove it: null takes global_max_length",
                "global_max_length",
                backend,
            )
    yield from _server_checks(rollout)
    yield from _sync_checks(config, rollout)


def _server_checks(rollout: RolloutMatchingConfig) -> Iterator[Problem]:
    if rollout.vllm.mode != "server" or rollout.vllm.server is None:
        return
    seen: dict[str, int] = {}
    for index, server in enumerate(rollout.vllm.server.servers):
        first = seen.setdefault(server.base_url.rstrip("/"), index)
        if first != index:
            yield problem(
                f"{_VLLM}.server.servers[{index}].base_url", f"is servers[{first}] again; list each server once"
            )


def _sync_checks(config: Sections, rollout: RolloutMatchingConfig) -> Iterator[Problem]:
    vllm, tuner, mode = rollout.vllm, config.tuner, f"{_VLLM}.sync.mode"
    reads = (f"{_VLLM}.enable_lora", f"{_RM}.rollout_backend")
    if vllm.sync.mode == "adapter" and not vllm.enable_lora:
        yield problem(mode, "adapter needs vllm.enable_lora: true; otherwise write full", *reads)
        return
    if vllm.enable_lora:
        yield from _rank_checks(vllm, tuner.lora_rank, reads)
    if vllm.sync.resolved(vllm.enable_lora) != "adapter":
        return
    what = "pushes adapters only"
    if tuner.train_type != "lora":
        yield problem(
            mode,
            f"{what}, and tuner.train_type: {tuner.train_type} trains none; write sync.mode: full",
            "tuner.train_type",
            *reads,
        )
        return
    for key, clash in {
        "tuner.train_coord_rows": tuner.train_coord_rows,
        "tuner.modules_to_save": bool(tuner.modules_to_save),
        "tuner.use_dora": tuner.use_dora,
    }.items():
        if clash:
            yield problem(
                mode,
                f"{what}, which would leave out what {key} trains; write sync.mode: full, or take {key} away",
                key,
                *reads,
            )


def _rank_checks(vllm: VLLMConfig, lora_rank: int, reads: tuple[str, ...]) -> Iterator[Problem]:
    key = f"{_VLLM}.max_lora_rank"
    if vllm.max_lora_rank is not None and vllm.max_lora_rank < lora_rank:
        yield problem(
            key,
            f"{vllm.max_lora_rank} is less than tuner.lora_rank ({lora_rank}); raise it, or remove it",
            "tuner.lora_rank",
            *reads,
        )
    elif vllm.adapter_rank(lora_rank) not in ADAPTER_RANKS:
        known = ", ".join(map(str, ADAPTER_RANKS))
        yield problem(
            key,
            f"vLLM makes room for adapters of rank {known}, not {vllm.adapter_rank(lora_rank)}; write one of those, or "
            "enable_lora: false",
            "tuner.lora_rank",
            *reads,
        )
