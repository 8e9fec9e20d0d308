"""Each module's value on one row, against a plain loop over positions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import fields

import numpy as np
import pytest
import torch

from coordexp.config.objective import PipelineConfig
from coordexp.config.schema import CoordSoftCEW1Config
from coordexp.metrics.table import find_metric
from coordexp.objective import (
    MODULES,
    HeadScores,
    ObjectivePipeline,
    SupervisionTensors,
    build_pipeline,
    sft_pipeline,
)
from coordexp.objective.pipeline import tree_map
from coordexp.packing import build_row
from coordexp.records import Segment
from coordexp.targets import TERMS, SupervisionWeights, count_terms
from support.answers import tiny_vocab
from support.objective_rows import (
    COORD_IDS,
    COORDS,
    EVERYTHING,
    EVERYTHING_WEIGHTS,
    Trigram,
    config,
    rewritten_and_soft_segments,
    scored,
    scores_from_logits,
    scores_of,
    segments,
)

STAGE_1 = SupervisionWeights.for_sft(None)


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - x.max() - math.log(np.exp(x - x.max()).sum())


def naive(model: Trigram, c: dict[str, float], step: tuple[Segment, ...]) -> dict[str, float]:
    """The terms of the step that consists of ``step``, by a loop over its positions."""
    sums: dict[str, float] = {}
    num: dict[str, int] = {}

    def add(name: str, value: float, count_as: str | None = None) -> None:
        sums[name] = sums.get(name, 0.0) + value
        num[count_as or name] = num.get(count_as or name, 0) + 1

    embed, head, ids = model.embed.detach().numpy(), model.head.detach().numpy(), COORD_IDS.numpy()
    for segment in step:
        tokens = [*segment.prompt_token_ids, *segment.target.token_ids]
        first = len(segment.prompt_token_ids)
        target = segment.target
        decoded: dict[int, float] = {}
        bin_at = dict(zip(target.coord_pos_K.tolist(), target.coord_bin_K.tolist(), strict=True))
        weight = {term: target.weights.get(term, [0.0] * len(tokens)) for term in TERMS}
        for t in range(len(target.token_ids)):
            z = (embed[tokens[first + t - 1]] + 0.7 * embed[tokens[first + t - 2]]) @ head
            log_p = log_softmax(z)
            mass = math.exp(np.logaddexp.reduce(log_softmax(z / c["temperature"])[ids]))
            if t in bin_at:
                log_b = log_softmax(z[ids] / c["temperature"])
                k = np.arange(1000)
                q = np.exp(-0.5 * ((k - bin_at[t]) / c["target_sigma"]) ** 2) * (
                    abs(k - bin_at[t]) <= c["target_truncate"]
                )
                q /= q.sum()
                add("coord_reg/coord_ce", -c["coord_ce_weight"] * float(log_b[round(bin_at[t])]))
                add("coord_reg/soft_ce", -c["soft_ce_weight"] * (q * log_b).sum())
                w1 = np.abs(np.cumsum(np.exp(log_b)) - np.cumsum(q)).sum() / 999
                add("coord_reg/w1", c["w1_weight"] * w1)
                add("coord_reg/coord_gate", -c["coord_gate_weight"] * math.log(mass))
                decoded[t] = (np.exp(log_softmax(z[ids])) * k).sum() / 999
            for term in ("struct_ce", "desc_ce"):
                if weight[term][t]:
                    add(f"token_ce/{term}", -float(weight[term][t]) * log_p[target.token_ids[t]], "text")
            if weight["text_gate"][t]:
                add("coord_reg/text_gate", -c["text_gate_weight"] * math.log1p(-min(mass, 1 - 1e-6)))
        for positions, bins in zip(target.box_pos_M4.tolist(), target.box_bin_M4.tolist(), strict=True):
            x1, y1, x2, y2 = (decoded[p] for p in positions)
            p = [min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)]
            t = [b / 999 for b in bins]
            l1 = [0.5 * (a - b) ** 2 if abs(a - b) < 1 else abs(a - b) - 0.5 for a, b in zip(p, t, strict=True)]
            add("bbox_geo/smoothl1", c["smoothl1_weight"] * sum(l1) / 4)
            add("bbox_geo/ciou", c["ciou_weight"] * naive_ciou(p, t))
    num["token_ce/struct_ce"] = num["token_ce/desc_ce"] = num.pop("text")
    return {f"loss/{name}": total / num[name] for name, total in sums.items()}


def naive_ciou(p: list[float], t: list[float]) -> float:
    eps = 1e-7
    inter = max(0.0, min(p[2], t[2]) - max(p[0], t[0])) * max(0.0, min(p[3], t[3]) - max(p[1], t[1]))
    (pw, ph), (tw, th) = ((b[2] - b[0], b[3] - b[1]) for b in (p, t))
    iou = inter / (pw * ph + tw * th - inter + eps)
    hull = (max(p[2], t[2]) - min(p[0], t[0])) ** 2 + (max(p[3], t[3]) - min(p[1], t[1])) ** 2 + eps
    shift = ((p[0] + p[2] - t[0] - t[2]) / 2) ** 2 + ((p[1] + p[3] - t[1] - t[3]) / 2) ** 2
    v = 4 / math.pi**2 * (math.atan(tw / th) - math.atan(pw / ph)) ** 2
    return 1 - iou + shift / hull + v * v / (1 - iou + v + eps)


def test_every_kind_of_entry_has_its_module() -> None:
    """Those of the sample pipeline: tests/support/config_samples.py declares every module."""
    schema = PipelineConfig.model_json_schema()
    assert set(schema["properties"]["objective"]["items"]["discriminator"]["mapping"]) <= set(MODULES)
    assert {spec.name for spec in (*config().objective, *config().diagnostics)} == set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_keeps_the_contract(name: str) -> None:
    """That of docs/add-a-module.md."""
    declared, pipeline = config(**EVERYTHING), build_pipeline(config(**EVERYTHING))
    (spec,) = [spec for spec in (*declared.objective, *declared.diagnostics) if spec.name == name]
    (module,) = [one.module for one in (*pipeline.objective, *pipeline.diagnostics) if one.name == name]
    is_trained = spec in declared.objective
    keys, own = set(type(spec.config).model_fields), {field.name for field in fields(MODULES[name])}
    assert keys == own - {"decode"} or name == "token_ce", "a key is a field of its module, without a default"
    assert not is_trained or any(key.endswith("_weight") for key in keys), "PipelineConfig.trains reads these"
    requested = module.required_logits()
    assert {*requested.vocab, *requested.coord_mass, *itertools.chain(*module.means_over.values())} <= set(TERMS)
    sums = module.sums(*scores_of(segments(EVERYTHING_WEIGHTS), Trigram(), pipeline))
    assert sums and set(sums) <= set(module.means_over), "every loss says what it is a mean over"
    assert {loss: value.shape for loss, value in sums.items()} == dict.fromkeys(sums, ()), "sums, not values"
    assert {value.requires_grad for value in sums.values()} == {is_trained}
    family = f"loss/{name}" if is_trained else name
    assert [loss for loss in module.means_over if find_metric(f"{family}/{loss}") is None] == [], "see metrics/table.py"


def test_every_term_has_positions() -> None:
    """A term without a role in the table of weights would never be trained; stage 1 alone has coord_token_ce."""
    counts = count_terms(one.target for weights in (EVERYTHING_WEIGHTS, STAGE_1) for one in segments(weights))
    assert [term for term, count in counts.items() if count == 0] == []


@pytest.mark.parametrize("read", ["weight_N", "mask_N"])
def test_a_misspelt_term_is_no_loss_of_0(read: str) -> None:
    found = supervision()
    with pytest.raises(AssertionError, match=r"'struct' is none of TERMS .*'struct_ce'"):
        found.weight_N("struct") if read == "weight_N" else found.mask_N(["struct"])


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("make_step", [segments, rewritten_and_soft_segments], ids=lambda make: make.__name__)
def test_every_term_equals_the_loop(make_step: Callable[..., tuple[Segment, ...]], seed: int) -> None:
    model, step = Trigram(seed), make_step(EVERYTHING_WEIGHTS)
    result = scored(build_pipeline(config(**EVERYTHING)), step, model)
    got = {name: value.item() for name, value in result.terms.items() if name.startswith("loss/")}
    assert got == pytest.approx(naive(model, EVERYTHING, step), rel=1e-9)
    assert result.loss.item() == pytest.approx(sum(got.values()), rel=1e-12)


@pytest.mark.parametrize("order", list(itertools.permutations(range(len(config().objective)))))
def test_order_never_changes_a_value(order: tuple[int, ...]) -> None:
    declared = config(**EVERYTHING)
    shuffled = declared.model_copy(update={"objective": tuple(declared.objective[i] for i in order)})
    want, got = (scored(build_pipeline(pipe), segments(), Trigram()) for pipe in (declared, shuffled))
    assert {name: term.item() for name, term in got.terms.items()} == {k: v.item() for k, v in want.terms.items()}
    assert got.loss.item() == pytest.approx(want.loss.item(), rel=1e-14)


@pytest.mark.parametrize("drop", [["bbox_geo"], ["token_ce"], ["bbox_geo", "token_ce"]])
def test_coordinate_terms_do_not_depend_on_other_modules(drop: list[str]) -> None:
    terms = ("coord_ce", "soft_ce", "w1", "coord_gate")
    alone = scored(build_pipeline(config(drop)), segments(), Trigram()).terms
    beside = scored(build_pipeline(config()), segments(), Trigram()).terms
    for term in terms:
        name = f"loss/coord_reg/{term}"
        assert (name in alone) == (name in beside)
        assert name not in alone or alone[name].item() == pytest.approx(beside[name].item(), rel=1e-14)


def test_a_pipeline_without_bbox_geo_decodes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from coordexp.objective import coord_math

    def fail(*_: object) -> None:
        raise AssertionError("decoded a coordinate")

    for name in ("expected_position", "canonical_boxes", "ciou_loss"):
        monkeypatch.setattr(coord_math, name, fail)
    without = config(
        ["bbox_geo"], **{k: v for k, v in EVERYTHING.items() if k not in ("smoothl1_weight", "ciou_weight")}
    )
    without = without.model_copy(update={"diagnostics": ()})
    terms = scored(build_pipeline(without), segments(), Trigram()).terms
    assert sorted(terms) == [
        f"loss/coord_reg/{t}" for t in ("coord_ce", "coord_gate", "soft_ce", "text_gate", "w1")
    ] + [
        "loss/token_ce/desc_ce",
        "loss/token_ce/struct_ce",
    ]
    with pytest.raises(AssertionError, match="decoded"):
        scored(build_pipeline(config()), segments(), Trigram())


@pytest.mark.parametrize("index", range(3), ids=["token_ce", "coord_reg", "bbox_geo"])
@pytest.mark.parametrize("change", [{"enabled": False}, {"channels": ("A",)}, {"channels": ()}, {"weight": 0.0}])
def test_a_disabled_module_is_not_built(index: int, change: dict) -> None:
    specs = list(config(**EVERYTHING).objective)
    specs[index] = specs[index].model_copy(update=change)
    pipe = build_pipeline(PipelineConfig(objective=tuple(specs), diagnostics=()))
    names = [spec.name for spec in specs if spec is not specs[index]]
    assert [entry.name for entry in pipe.objective] == names
    terms = scored(pipe, segments(), Trigram()).terms
    assert {name.split("/")[1] for name in terms} == set(names)


def test_module_weight_scales_its_terms_and_never_a_diagnostic() -> None:
    declared = config()
    scaled = PipelineConfig(
        objective=tuple(spec.model_copy(update={"weight": 2.5}) for spec in declared.objective),
        diagnostics=tuple(spec.model_copy(update={"weight": 0.5}) for spec in declared.diagnostics),
    )
    want, got = (scored(build_pipeline(pipe), segments(), Trigram()).terms for pipe in (declared, scaled))
    for name, value in want.items():
        factor = 2.5 if name.startswith("loss/") else 1.0
        assert got[name].item() == pytest.approx(factor * value.item(), rel=1e-12)


def supervision() -> SupervisionTensors:
    return SupervisionTensors.from_row(build_row([segments()[1]]))


def peaked(
    pipeline: ObjectivePipeline, bins: list[tuple[int, ...]], height: float = 1e4
) -> tuple[SupervisionTensors, HeadScores]:
    """A row of ground-truth boxes with all coordinate logits on ``bins``."""
    found = supervision()
    logits = torch.zeros(len(found.position_N), len(tiny_vocab()), dtype=torch.float64)
    flat = [k for box in bins for k in box]
    logits[found.coord_in_N_K[: len(flat)], COORD_IDS[flat]] = height
    return found, scores_from_logits(logits, pipeline.query(found), found.label_N, COORDS)


def test_bbox_geo_decodes_by_the_expectation() -> None:
    """Two thirds of each side's mass on the true bin, the rest at the far end: the likeliest bin is right."""
    pipeline = build_pipeline(config())
    row = peaked(pipeline, [(500, 500, 700, 800)], height=math.log(2 * 999))
    assert pipeline.objective[2].module.sums(*row)["smoothl1"].item() > 1e-3


def test_values_of_diagnostics() -> None:
    sums = MODULES["coord_diag"]().sums(*peaked(build_pipeline(config()), [(500, 500, 700, 801)]))
    num = 10  # four sides of the box, six coordinates of the polygon with flat logits
    assert sums["p_target"].item() == pytest.approx(3 + 6 / 1000, abs=1e-9)
    assert sums["acc_top5"].item() >= 3
    flat = sum(abs(k - 499.5) for k in segments()[1].target.coord_bin_K[4:])
    assert sums["expected_bin_mae"].item() == pytest.approx(1 + flat, rel=1e-9)
    vocabulary = len(COORD_IDS) / len(tiny_vocab())
    assert sums["coord_mass"].item() == pytest.approx(4 + (num - 4) * vocabulary, rel=1e-9)


def test_diagnostics_carry_no_gradient() -> None:
    model = Trigram()
    result = scored(build_pipeline(config()), segments(), model)
    assert all(not value.requires_grad for value in result.terms.values())


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_one_broken_logit_cannot_erase_the_step(broken: float) -> None:
    """A column of the head that is broken: one logit at every position of the row."""
    model = Trigram()
    with torch.no_grad():
        model.embed[:, 0] = 1.0
        model.head[:, 3] = 0.0
        model.head[0, 3] = broken
    result = scored(build_pipeline(config(**EVERYTHING)), segments(), model)
    result.loss.backward()
    assert torch.isfinite(result.loss)
    embed, head = model.gradients()
    assert torch.isfinite(embed).all() and torch.isfinite(head).all()
    assert embed.abs().sum() > 0 and head.abs().sum() > 0
    assert torch.count_nonzero(head[:, 3]) == 0, "clamped logits have no gradient"


def test_scores_rounded_by_a_wrapper_are_refused() -> None:
    pipeline = build_pipeline(config())
    supervision, scores = scores_of(segments(), Trigram(), pipeline)
    rounded = scores._replace(label_logit_N=scores.label_logit_N.bfloat16())
    with pytest.raises(AssertionError, match="output_dtype"):
        pipeline(supervision, rounded, count_terms(segment.target for segment in segments()))


def test_half_precision_gives_a_float32_loss() -> None:
    model = Trigram()
    model.embed, model.head = (value.detach().bfloat16().requires_grad_() for value in (model.embed, model.head))
    assert scored(build_pipeline(config()), segments(), model).loss.dtype == torch.float32


# -- stage 1 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coord_loss", [None, CoordSoftCEW1Config(enabled=False)])
def test_plain_sft_is_full_vocabulary_cross_entropy(coord_loss: CoordSoftCEW1Config | None) -> None:
    """One mean over every token of the answers, as any language model is fine-tuned."""
    weighted = segments(SupervisionWeights.for_sft(coord_loss))
    row, model = [weighted[1], weighted[4]], Trigram()
    found = SupervisionTensors.from_row(build_row(row))
    assert 0 < len(found.coord_in_N_K) < len(found.label_N)
    logits = model(torch.from_numpy(build_row(row).token_ids_L), found.position_N) @ model.head
    full = torch.nn.functional.cross_entropy(logits, found.label_N)
    result = scored(sft_pipeline(coord_loss), row, model)
    assert result.loss.item() == pytest.approx(full.item(), rel=1e-12)


def test_sft_with_a_coordinate_loss_uses_its_keys() -> None:
    keys = CoordSoftCEW1Config(
        enabled=True, ce_weight=0.3, soft_ce_weight=0.5, w1_weight=0.7, gate_weight=0.9, text_gate_weight=1.1,
        temperature=1.5, target_sigma=3.0, target_truncate=12.0,
    )  # fmt: skip
    same = config(
        ["bbox_geo"], coord_ce_weight=0.3, soft_ce_weight=0.5, w1_weight=0.7, coord_gate_weight=0.9, temperature=1.5,
        text_gate_weight=1.1, target_sigma=3.0, target_truncate=12.0,
    )  # fmt: skip
    want, got = (scored(pipe, [segments()[1]], Trigram()) for pipe in (build_pipeline(same), sft_pipeline(keys)))
    assert {k: v.item() for k, v in got.terms.items()} == {k: v.item() for k, v in want.terms.items()}


# -- a row and its supervision -------------------------------------------------------------------------------------


def test_a_row_keeps_the_positions_that_have_a_weight_and_no_others() -> None:
    found = SupervisionTensors.from_row(build_row(segments()))
    totals = count_terms(segment.target for segment in segments())
    assert totals == {term: int((found.weight_N(term) != 0).sum()) for term in TERMS}
    assert totals["coord"] == len(found.coord_in_N_K) == len(found.coord_bin_K)
    assert totals["box"] == len(found.box_in_K_M4) == len(found.box_bin_M4)
    assert torch.stack([weight_N != 0 for weight_N in found.weights.values()]).any(dim=0).all()


def test_labels_and_boxes_point_at_their_tokens() -> None:
    found = SupervisionTensors.from_row(build_row(segments()))
    row = build_row(segments())
    assert found.label_N.tolist() == row.token_ids_L[found.position_N].tolist()
    assert torch.isin(found.label_N[found.coord_in_N_K], COORD_IDS).all()
    assert torch.equal(found.coord_bin_K[found.box_in_K_M4], found.box_bin_M4)
    moved = tree_map(lambda tensor: tensor.to("meta"), found)
    devices: set[str] = set()
    tree_map(lambda tensor: devices.add(tensor.device.type) or tensor, moved)
    assert devices == {"meta"} and moved.weights.keys() == found.weights.keys()
