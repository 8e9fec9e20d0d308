"""Adapters, coordinate rows and the trainer's weights where a model is replicated or split over two processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from coordexp.coords import serialize_objects
from coordexp.data.dataset import Sample
from coordexp.modeling.adapter import load_adapter, save_adapter
from coordexp.modeling.inputs import row_inputs
from coordexp.modeling.load import LoadedModel, load_model
from coordexp.modeling.scores import TokenScorer
from coordexp.modeling.trainer_weights import TrainerWeights, output_head
from coordexp.parsing import parse_rollout
from coordexp.records import Rollout
from coordexp.rollouts.backend import DecodingOptions, SeedContext
from coordexp.rollouts.hf import HFBackend
from support.tiny_run import gt_segments, load_tiny, row_of, tiny_checkpoint, tiny_samples
from support.torchrun import results_of_two
from support.tuned_models import lora, tuned, untied_checkpoint

ROWS = (slice(0, 1), slice(1, 4))  # of each rank
CLAIMS = {
    "ddp gradients": "every trained weight reaches DDP's reducer, also recomputed, and gets both ranks' mean",
    "fsdp weights": "gathered and merged shards equal the unsharded model's merged weights, bit for bit",
    "fsdp adapter": "an adapter push has whole tensors",
    "shards untouched": "reading them changes no shard",
    "fsdp gradients": "the offset's hooks see gathered parameters, and its gradient is reduced",
    "fsdp untied head": "the loss can read a separately sharded head, and its gradient is reduced",
    "fsdp answers": "ranks with unequally many batches, or none, get the unsharded model's answers",
    "fsdp scores": "ranks with unequally many answers to score, or none, get the unsharded model's scores",
    "collective": "a source reports whether reading it is collective",
    "saved adapter": "an adapter saved from gathered shards loads into a whole model",
}


def inputs_of(loaded: LoadedModel, which: slice) -> dict[str, Any]:
    row = row_of(gt_segments(loaded, 4)[which])
    return row_inputs(row, loaded.model.model.get_rope_index, loaded.image_token_id, "packed")


def scored(model: Any, loaded: LoadedModel, which: slice) -> torch.Tensor:
    return model(**inputs_of(loaded, which), use_cache=False).logits.logsumexp(-1).sum()


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name.removeprefix("module."): p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in found.items()}  # type: ignore[union-attr]


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[n], b[n], atol=1e-5, rtol=1e-3) for n in a)


def fresh() -> LoadedModel:
    return tuned(lora(use_dora=True, lora_dropout=0.0))


def reference_gradients() -> dict[str, torch.Tensor]:
    loaded = fresh()
    (sum(scored(loaded.model, loaded, part) for part in ROWS) / 2).backward()  # type: ignore[union-attr]
    return gradients(loaded.model)


def head_gradients(rows: Any) -> dict[str, torch.Tensor]:
    """Gradients of an untied model by a loss that multiplies by the head's weight. ``rows``: one rank's, or None
    for the mean over both in one process without sharding."""
    loaded = load_model(untied_checkpoint())
    if rows is not None:  # as accelerate does it: the head is a unit of its own
        for layer in [*loaded.model.model.language_model.layers, loaded.model.lm_head]:
            fully_shard(layer)
        fully_shard(loaded.model)
    for part in ROWS if rows is None else (rows,):

        def loss(model: Any, inputs: Any = inputs_of(loaded, part)) -> torch.Tensor:  # noqa: B008
            hidden_H = model.model(**inputs, use_cache=False)[0]
            return (hidden_H @ output_head(model).weight_VH.T).logsumexp(-1).sum()

        (loaded.model(forward_fn=loss) / (1 if rows is not None else 2)).backward()
    return gradients(loaded.model)


def answers_of(loaded: LoadedModel, samples: Sequence[Sample], skips: bool) -> list[tuple[int, ...]]:
    options = DecodingOptions(12, temperature=0.0, top_p=1.0, top_k=-1, num_beams=1, repetition_penalty=1.0)
    backend = HFBackend(loaded.model, loaded.vocab, options, 1, loaded.image_token_id, skip_forced_tokens=skips)
    rollouts = backend.generate([sample.request for sample in samples], SeedContext(0, 0, 0, 0))
    return [rollout.response_token_ids for rollout in rollouts]


def scores_of(loaded: LoadedModel, samples: Sequence[Sample]) -> list[float]:
    """As if the model had answered with the annotations."""
    scorer, vocab = TokenScorer(loaded.model, loaded.vocab, loaded.image_token_id), loaded.vocab
    rollouts = []
    for sample in samples:
        text = serialize_objects(sample.record.objects)
        ids = tuple(vocab.encode(text))
        rollouts.append(Rollout(sample.record.sample_id, sample.request.prompt_token_ids, ids, text, truncated=False))
    parsed = [parse_rollout(rollout.response_token_ids, vocab, ended=True) for rollout in rollouts]
    found = scorer.score([sample.request for sample in samples], rollouts, parsed)
    return [one.score for answer in found for one in answer]


def check_answers(seen: dict[str, Any]) -> None:
    """The ranks get 3 and 1 samples, then none and 2."""
    alone, sharded = load_tiny(sharpen=3.0), load_tiny(sharpen=3.0)
    for layer in [*sharded.model.model.language_model.layers, *sharded.model.model.visual.blocks]:
        fully_shard(layer)
    fully_shard(sharded.model)
    register_fsdp_forward_method(sharded.model, "generate")
    samples = tiny_samples(alone, 4)
    parts = [(samples[:3], samples[3:]), ([], samples[1:3])]
    mine = [part[dist.get_rank()] for part in parts]
    # Both in the same order on both ranks, whatever the answers are.
    found = [([answers_of(sharded, part, skips) for skips in (False, True)], scores_of(sharded, part)) for part in mine]
    seen["fsdp answers"] = [answers for answers, _ in found] == [[answers_of(alone, part, False)] * 2 for part in mine]
    seen["fsdp scores"] = all(
        scores == pytest.approx(scores_of(alone, part), rel=1e-5) for (_, scores), part in zip(found, mine, strict=True)
    )


def check_rank(folder: Path) -> None:
    # Before transformers sees a group, of which only the first rank would write.
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

    with TrainerWeights(fresh().model).full() as tensors:
        plain = {name: tensor.clone() for name, tensor in tensors}
    loaded = fresh()
    collective = [TrainerWeights(loaded.model).collective]
    for layer in [*loaded.model.model.language_model.layers, *loaded.model.model.visual.blocks]:
        fully_shard(layer)
    fully_shard(loaded.model)
    source = TrainerWeights(loaded.model)
    seen["collective"] = [*collective, source.collective] == [False, True]
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
    check_answers(seen)
    seen["fsdp untied head"] = "lm_head.weight" in whole and close(head_gradients(ROWS[rank]), whole)

    state = {n: p.full_tensor() for n, p in loaded.model.named_parameters()}  # type: ignore[attr-defined]
    save_adapter(loaded.model, folder / f"adapter{rank}", state)
    again = tuned(lora(use_dora=True, lora_dropout=0.0), seed=8)
    load_adapter(again.model, folder / f"adapter{rank}")
    seen["saved adapter"] = all(
        torch.equal(p, state[name]) for name, p in again.model.named_parameters() if p.requires_grad
    )
    (folder / f"rank{rank}.json").write_text(json.dumps(seen), encoding="utf-8")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, bool]]:
    folder = tmp_path_factory.mktemp("sharded")
    return results_of_two(folder, check_rank, folder)


@pytest.mark.parametrize("claim", CLAIMS)
def test_sharded_weights_on_both_ranks(claim: str, ranks: list[dict[str, bool]]) -> None:
    assert [rank[claim] for rank in ranks] == [True, True], CLAIMS[claim]
