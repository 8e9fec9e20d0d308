"""What the learner touches of transformers, accelerate, peft and torch that these packages promise nobody.

:func:`check_learner` looks for all of it before a model is loaded: a hook that was renamed would otherwise never
be called again, in silence, and a run would save, resume or synchronise wrongly.
"""

from __future__ import annotations

from coordexp.engine.compatibility import UpstreamName, check_upstream

_SAVING = "checkpoints that are written whole, sealed, and with the buffer of waiting segments"
_RESUMING = "going on from a checkpoint, with every weight found in it"
_STEPS = "optimizer steps: a window of rollouts, then its rows"
_LOG_LINE = "log lines that cover the same steps after a resume"
_LORA = "merging adapters into the weights that engines get"
_TOWER = "images of a row that go through the vision tower together, without waiting for the device"
_GROUP = "weight groups on one address, with deadlines"


def _called(hooks: str, purpose: str) -> tuple[UpstreamName, ...]:
    """Methods of ``Trainer`` that are overridden here, and must be both there and called."""
    return tuple(
        UpstreamName("transformers.trainer", f"Trainer{part}", purpose, mentions=mentions)
        for hook in hooks.split()
        for part, mentions in ((f".{hook}", ""), ("", f"self.{hook}("))
    )


LEARNER = (
    *_called("_save _save_checkpoint", _SAVING),
    *_called("_load_from_checkpoint _load_optimizer_and_scheduler _load_rng_state", _RESUMING),
    *_called("_load_best_model _issue_warnings_after_load", _RESUMING),
    *_called("_prepare_inputs get_batch_samples training_step compute_loss create_optimizer", _STEPS),
    *_called("floating_point_ops log evaluate", _STEPS),
    UpstreamName("transformers.trainer", "Trainer", _LOG_LINE, mentions="self._tr_loss"),
    UpstreamName("transformers.trainer", "Trainer", _LOG_LINE, mentions="self._globalstep_last_logged"),
    UpstreamName("transformers.trainer", "Trainer", _STEPS, mentions="self.callback_handler.train_dataloader"),
    UpstreamName("transformers.trainer", "TRAINER_STATE_NAME", _SAVING),
    UpstreamName("transformers.trainer", "TRAINING_ARGS_NAME", _SAVING),
    UpstreamName("transformers.training_args", "TrainingArguments", "one device a process", mentions="_n_gpu"),
    UpstreamName("accelerate.state", "PartialState._shared_state", "FSDP chosen by the YAML"),
    UpstreamName("accelerate.state", "GradientState._set_sync_gradients", "one exchange of gradients a step"),
    *(
        UpstreamName("peft.tuners.lora.layer", "LoraLayer", _LORA, mentions=f"self.{name}")
        for name in ("lora_A", "lora_B", "scaling", "lora_magnitude_vector", "base_layer")
    ),
    UpstreamName("transformers.vision_utils", "get_vision_interpolation_indices_and_weights", _TOWER),
    UpstreamName("transformers.vision_utils", "get_vision_position_ids", _TOWER),
    *(
        UpstreamName("transformers.models.qwen3_vl.modeling_qwen3_vl", "Qwen3VLVisionModel", _TOWER, f"self.{name}")
        for name in ("num_grid_per_side", "interpolation_mode", "interpolation_align_corners", "spatial_merge_size")
    ),
    UpstreamName("torch", "UntypedStorage._cdata", "moving the learner out of an engine's way"),
    *(
        UpstreamName("torch.distributed", f"ProcessGroupGloo.{name}", _GROUP)
        for name in (
            "_Options",
            "_Options._devices",
            "_Options._threads",
            "_Options._timeout",
            "create_device",
            "abort",
        )
    ),
)


def check_learner() -> None:
    """Make sure that all of it is there; warn where a version is none of those tested.

    Raises:
        UpstreamChanged: with every name that is gone.
    """
    check_upstream(LEARNER)
