"""One of two processes: adapters and coordinate rows under DDP, weights under FSDP2; notes what it saw."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from coordexp.modeling.adapter import load_adapter, save_adapter
from coordexp.modeling.coord_offset import output_head
from coordexp.modeling.inputs import row_inputs
from coordexp.modeling.load import LoadedModel, load_model
from coordexp.modeling.weights import LearnerWeights
from support.tiny_run import gt_segments, row_of, tiny_checkpoint
from support.tuned_models import lora, tuned, untied_checkpoint


def scored(model: Any, loaded: LoadedModel, which: slice) -> torch.Tensor:
    """A loss over one packed row, through the wrapped model's forward."""
    segments = gt_segments(loaded, 4)[which]
    inputs = row_inputs(
        row_of(segments), loaded.model.model.get_rope_index, loaded.image_token_id, "packed", torch.float32
    )
    return model(**inputs, use_cache=False).logits.logsumexp(-1).sum()


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name.removeprefix("module."): p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in found.items()}  # type: ignore[union-attr]


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[n], b[n], atol=1e-5, rtol=1e-3) for n in a)


def fresh() -> LoadedModel:
    return tuned(lora(use_dora=True, lora_dropout=0.0))


def reference_gradients() -> dict[str, torch.Tensor]:
    """The mean over both ranks' rows, in one process."""
    loaded = fresh()
    (sum(scored(loaded.model, loaded, part) for part in ROWS) / 2).backward()  # type: ignore[union-attr]
    return gradients(loaded.model)


def head_gradients(rows: Any) -> dict[str, torch.Tensor]:
    """Of a model with a head of its own, by a loss that multiplies by the head's weight. ``rows``: one rank's, or None
    for the mean over both in one process without sharding."""
    loaded = load_model(untied_checkpoint())
    if rows is not None:  # as accelerate does it: the head is a unit of its own
        for layer in [*loaded.model.model.language_model.layers, loaded.model.lm_head]:
            fully_shard(layer)
        fully_shard(loaded.model)
    for part in ROWS if rows is None else (rows,):
        inputs = row_inputs(
            row_of(gt_segments(loaded, 4)[part]),
            loaded.model.model.get_rope_index,
            loaded.image_token_id,
            "packed",
            torch.float32,
        )

        def loss(model: Any, inputs: Any = inputs) -> torch.Tensor:
            hidden_H = model.model(**inputs, use_cache=False)[0]
            return (hidden_H @ output_head(model).weight_VH.T).logsumexp(-1).sum()

        (loaded.model(forward_fn=loss) / (1 if rows is not None else 2)).backward()
    return gradients(loaded.model)


ROWS = (slice(0, 1), slice(1, 4))


def main(folder: Path) -> None:
    # each process its own, before transformers sees a group and lets its first rank alone write
    tiny_checkpoint()
    untied_checkpoint()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seen: dict[str, Any] = {}
    expected = reference_gradients()

    loaded = fresh()
    loaded.model.gradient_checkpointing_enable()
    ddp = DistributedDataParallel(loaded.model.train())
    scored(ddp, loaded, ROWS[rank]).backward()
    seen["ddp gradients"] = close(gradients(ddp), expected)

    with LearnerWeights(fresh().model).full() as tensors:
        plain = {name: tensor.clone() for name, tensor in tensors}
    loaded = fresh()
    seen["collective"] = [LearnerWeights(loaded.model).collective]
    for layer in [*loaded.model.model.language_model.layers, *loaded.model.model.visual.blocks]:
        fully_shard(layer)
    fully_shard(loaded.model)
    source = LearnerWeights(loaded.model)
    seen["collective"].append(source.collective)
    shards = {name: p.to_local().clone() for name, p in loaded.model.named_parameters()}  # type: ignore[attr-defined]
    with source.full() as tensors:
        gathered = dict(tensors)
    seen["fsdp weights"] = list(gathered) == list(plain) and all(torch.equal(gathered[n], plain[n]) for n in plain)
    adapter = source.adapter()
    assert adapter is not None
    seen["fsdp adapter"] = all(not hasattr(tensor, "full_tensor") for _, tensor in (*adapter.tensors, *adapter.changed))
    seen["shards untouched"] = all(
        torch.equal(p.to_local(), shards[name])  # type: ignore[attr-defined]
        for name, p in loaded.model.named_parameters()
    )
    scored(loaded.model, loaded, ROWS[rank]).backward()
    seen["fsdp gradients"] = close(gradients(loaded.model), expected)

    whole = head_gradients(None)
    seen["fsdp untied head"] = "lm_head.weight" in whole and close(head_gradients(ROWS[rank]), whole)

    state = {n: p.full_tensor() for n, p in loaded.model.named_parameters()}  # type: ignore[attr-defined]
    if rank == 0:
        save_adapter(loaded.model, folder / "adapter", state)
        again = tuned(lora(use_dora=True, lora_dropout=0.0), seed=8)
        load_adapter(again.model, folder / "adapter")
        seen["saved adapter"] = all(
            torch.equal(p, state[name]) for name, p in again.model.named_parameters() if p.requires_grad
        )
    (folder / f"rank{rank}.json").write_text(json.dumps(seen), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
