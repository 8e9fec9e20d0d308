"""The score of an object is its tokens' probability under the model, however the answer came about."""

from __future__ import annotations

import math

import pytest
import torch

from coordexp.checkpoints.card import Calibration
from coordexp.coords import serialize_objects
from coordexp.modeling.scores import COORD_WEIGHT, NEIGHBOURS, WIDE_NEIGHBOURS, ObjectScore, TokenScorer
from coordexp.parsing import parse_rollout
from coordexp.records import ImageRecord, ParsedRollout, Rollout, RolloutRequest
from support.answers import CAT, DOG, request
from support.qwen_tokenizer import qwen_vocab
from support.tiny_run import load_tiny, tiny_samples


class FakeModel(torch.nn.Module):
    """Gives every position the same logits except for the favoured tokens; records the last call."""

    def __init__(self, favour: dict[int, float]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.favour = favour
        self.dtype = torch.float32

    def forward(self, *, input_ids, logits_to_keep, **inputs):
        self.asked = (input_ids, logits_to_keep, inputs, self.training)
        logits = torch.zeros(1, len(logits_to_keep), len(qwen_vocab()))
        for token_id, value in self.favour.items():
            logits[..., token_id] = value
        return type("Output", (), {"logits": logits})


def answered(objects) -> tuple[list[RolloutRequest], list[Rollout], list[ParsedRollout]]:
    vocab = qwen_vocab()
    text = serialize_objects(objects)
    ids = tuple(vocab.encode(text))
    asked = request(ImageRecord("s", __file__, 8, 8, ()))  # type: ignore[arg-type]
    asked = RolloutRequest("s", asked.image, asked.messages, (1, 2, 3), {
        "pixel_values": torch.zeros(1, 2), "image_grid_thw": torch.ones(1, 3, dtype=torch.int64)})  # fmt: skip
    return [asked], [Rollout("s", (1, 2, 3), ids, text, False)], [parse_rollout(ids, vocab, ended=True)]


def test_uniform_probabilities_give_the_formula() -> None:
    model = FakeModel({})
    ((found,),) = TokenScorer(model, qwen_vocab(), 5).score(*answered([CAT]))
    size = len(qwen_vocab())
    expected = COORD_WEIGHT * math.log((2 * NEIGHBOURS + 1) / size) + (1 - COORD_WEIGHT) * math.log(1 / size)
    assert found.score == pytest.approx(math.exp(expected), rel=1e-5)


def test_confidence_uses_the_description_and_neighbouring_bins() -> None:
    asked, rollout, parsed = answered([CAT.__class__(CAT.desc, CAT.kind, (100, 200, 300, 400))])
    model, size = FakeModel({}), len(qwen_vocab())
    ((found,),) = TokenScorer(model, qwen_vocab(), 5).score(asked, rollout, parsed)
    start, stop = parsed[0].objects[0].desc_token_span
    expected = math.log((2 * WIDE_NEIGHBOURS + 1) / size) + (stop - start) * math.log(1 / size)
    assert found.confidence == pytest.approx(math.exp(expected), rel=1e-5)
    calibrated = TokenScorer(model, qwen_vocab(), 5, Calibration(slope=0.1, intercept=2.0))
    ((found,),) = calibrated.score(asked, rollout, parsed)
    assert found.confidence == pytest.approx(Calibration(0.1, 2.0)(math.exp(expected)), rel=1e-5)


def test_a_bin_at_the_edge_has_fewer_neighbours() -> None:
    edge = CAT.__class__(CAT.desc, CAT.kind, (0, 0, 0, 0))
    middle, at_edge = (
        TokenScorer(FakeModel({}), qwen_vocab(), 5).score(*answered([o]))[0][0].score for o in (CAT, edge)
    )
    assert at_edge == pytest.approx(middle * ((NEIGHBOURS + 1) / (2 * NEIGHBOURS + 1)) ** COORD_WEIGHT, rel=1e-5)


def test_favoured_tokens_score_higher() -> None:
    vocab = qwen_vocab()
    sure = {vocab.coord_token_ids[k]: 20.0 for k in CAT.bins}
    ((cat, dog),) = TokenScorer(FakeModel(sure), vocab, 5).score(*answered([CAT, DOG]))
    assert 0 < dog.score < cat.score < 1


def test_only_needed_positions_are_computed_and_the_mode_is_kept() -> None:
    model = FakeModel({}).train()
    asked, (rollout,), (parsed,) = answered([CAT])
    TokenScorer(model, qwen_vocab(), 5).score(asked, [rollout], [parsed])
    ids, kept, inputs, training = model.asked
    obj = parsed.objects[0]
    wanted = sorted({*obj.coord_token_idx, *range(*obj.desc_token_span)})
    assert kept.tolist() == [3 + at - 1 for at in wanted]  # the token at p is predicted from position p - 1
    assert ids.tolist() == [[1, 2, 3, *rollout.response_token_ids[: wanted[-1]]]]
    assert inputs["use_cache"] is False and training is False and model.training is True


def test_an_answer_without_objects_needs_no_forward() -> None:
    model = FakeModel({})
    assert TokenScorer(model, qwen_vocab(), 5).score(*answered([])) == [()]
    assert not hasattr(model, "asked")


def test_a_placeholder_of_an_image_after_the_objects_is_not_read() -> None:
    """The model may write one, and its own forward refuses a placeholder without an image."""
    loaded = load_tiny()
    (sample,) = tiny_samples(loaded, 1)
    vocab, scorer = loaded.vocab, TokenScorer(loaded.model, loaded.vocab, loaded.image_token_id)
    whole = vocab.encode(serialize_objects(sample.record.objects))

    def scores(*token_ids: int) -> list[tuple[ObjectScore, ...]]:
        rollout = Rollout("s", sample.request.prompt_token_ids, token_ids, vocab.decode(token_ids), truncated=True)
        return scorer.score([sample.request], [rollout], [parse_rollout(token_ids, vocab)])

    (found,) = scores(*whole, loaded.image_token_id)
    assert len(found) == len(sample.record.objects) > 0
    assert [found] == scores(*whole)
