"""What the objective sees: what should stand at a packed row's supervised positions, what its modules want of the
language head there, joined into one query, and what the head says. Each number is computed once, and only if wanted.

N supervised positions of a row, U of them scored against the whole vocabulary, K coordinate slots, G text positions of
the text gate; B = 1000 bins, T temperatures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from coordexp.packing import supervise_row
from coordexp.records import PackedRow, TokenRole, TrainingTarget


@dataclass(frozen=True, slots=True, eq=False)
class HeadQuery:
    """Which numbers of the head the modules want of one row. Whatever nobody wants is not computed.

    ``vocab_in_N_U``: positions scored against the whole vocabulary, those with a gradient (``num_trained``) first;
    ``slot_in_U_K``: the coordinate slots among them, all or none; ``text_gate_in_U_G``: text positions among them
    whose mass on coordinate tokens is wanted; ``slot_in_N_K``: the slots whose 1000 coordinate logits are wanted, all
    or none; ``num_scored``: positions of which anything is computed.
    """

    vocab_in_N_U: torch.Tensor
    slot_in_U_K: torch.Tensor
    text_gate_in_U_G: torch.Tensor
    slot_in_N_K: torch.Tensor
    num_trained: int
    num_scored: int
    temperatures: tuple[float, ...]

    def to(self, device: torch.device) -> HeadQuery:
        """The same on ``device``."""
        return move(self, device)


def move(record: Any, device: torch.device) -> Any:
    """A copy of a dataclass with its tensors on ``device``; what is no tensor stays."""
    return map_tensors(record, lambda tensor: tensor.to(device, non_blocking=device.type == "cuda"))


def map_tensors(record: Any, act: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of a dataclass with ``act`` of each of its tensors; what is no tensor stays."""
    mapped = {name: act(value) for name in record.__slots__ if isinstance(value := getattr(record, name), torch.Tensor)}
    return replace(record, **mapped)


@lru_cache(maxsize=8)
def coord_ids_on(coord_ids: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The coordinate tokens by bin, int64 (B,). Kept: to copy a Python list to a GPU is to wait for it."""
    with torch.inference_mode(False):  # whoever comes first may hold no gradient, and others do
        return torch.tensor(coord_ids, device=device)


class HeadScores(NamedTuple):
    """The head's answers, float32 or wider, finite. A tuple of tensors: DDP and FSDP look into what a forward returns.

    ``vocab_lse_TU`` logsumexp(z/τ) over the vocabulary; ``label_logit_U``; ``coord_lse_TG`` logsumexp(z/τ) over the
    coordinate columns; ``coord_logit_KB``. ``nonfinite_N`` positions with a NaN or infinite logit, ``clamped_N`` those
    whose finite logits passed the limit and were cut off.
    """

    vocab_lse_TU: torch.Tensor
    label_logit_U: torch.Tensor
    coord_lse_TG: torch.Tensor
    coord_logit_KB: torch.Tensor
    nonfinite_N: torch.Tensor
    clamped_N: torch.Tensor


# Positions whose hidden states are kept: the roles that some module of the objective may supervise. All others cost
# nothing, and a module cannot reach them.
SUPERVISED_ROLES = (
    TokenRole.PREFIX_COORD,
    TokenRole.TAIL_STRUCT,
    TokenRole.TAIL_DESC,
    TokenRole.TAIL_COORD,
    TokenRole.CLOSE,
    TokenRole.EOS,
    TokenRole.PREFIX_STRUCT,
    TokenRole.REWRITTEN_STRUCT,
    TokenRole.REWRITTEN_DESC,
)


@dataclass(frozen=True, slots=True)
class SupervisionCounts:
    """How many positions each kind of supervision has: the exact denominators of an optimizer step.

    Additive over segments, micro-steps and ranks. ``desc_gt`` and ``desc_rollout`` are description tokens by context;
    ``struct`` is tail structure without the closing brace and EOS, which ``closure`` counts; ``prefix_struct`` is
    matched objects' structure in the model's own prefix; ``rewritten_struct`` and ``rewritten_desc`` are their text in
    a rewritten answer.
    """

    struct: int = 0
    closure: int = 0
    desc_gt: int = 0
    desc_rollout: int = 0
    coords: int = 0
    boxes: int = 0
    prefix_struct: int = 0
    rewritten_struct: int = 0
    rewritten_desc: int = 0

    @classmethod
    def from_targets(cls, targets: Iterable[TrainingTarget]) -> SupervisionCounts:
        """The counts of these targets together."""
        total = cls()
        for target in targets:
            by_role = np.bincount(target.roles_T, minlength=len(TokenRole))
            desc = int(by_role[TokenRole.TAIL_DESC])
            total += cls(
                struct=int(by_role[TokenRole.TAIL_STRUCT]),
                closure=int(by_role[TokenRole.CLOSE] + by_role[TokenRole.EOS]),
                desc_gt=desc if target.context == "gt" else 0,
                desc_rollout=desc if target.context == "rollout" else 0,
                coords=len(target.coord_pos_K),
                boxes=len(target.box_pos_M4),
                prefix_struct=int(by_role[TokenRole.PREFIX_STRUCT]),
                rewritten_struct=int(by_role[TokenRole.REWRITTEN_STRUCT]),
                rewritten_desc=int(by_role[TokenRole.REWRITTEN_DESC]),
            )
        return total

    def __add__(self, other: SupervisionCounts) -> SupervisionCounts:
        return SupervisionCounts(*(a + b for a, b in zip(self.as_tuple(), other.as_tuple(), strict=True)))

    def as_tuple(self) -> tuple[int, ...]:
        """The counts in the order of the fields, as ranks sum them."""
        return astuple(self)


@dataclass(frozen=True, slots=True, eq=False)
class SupervisionTensors:
    """A packed row's supervision as tensors. N supervised positions of the row's L tokens, K of them coordinates.

    ``position_N``: positions of the supervised tokens (their hidden states stand at ``position_N − 1``); ``label_N``
    token ids; ``role_N`` :class:`TokenRole`; ``text_weight_N`` float32, the factor on each token's cross-entropy;
    ``from_gt_N`` whether the segment was written from ground truth;
    ``coord_in_N_K`` indices into N of the coordinate slots and ``coord_bin_K`` their targets; ``box_in_K_M4`` indices
    into K of each box's four slots and ``box_bin_M4`` its true bins.
    """

    position_N: torch.Tensor
    label_N: torch.Tensor
    role_N: torch.Tensor
    text_weight_N: torch.Tensor
    from_gt_N: torch.Tensor
    coord_in_N_K: torch.Tensor
    coord_bin_K: torch.Tensor
    box_in_K_M4: torch.Tensor
    box_bin_M4: torch.Tensor

    @classmethod
    def from_row(cls, row: PackedRow) -> SupervisionTensors:
        """Lay out what :func:`coordexp.packing.supervise_row` found."""
        row_supervision = supervise_row(row)
        position_N = np.flatnonzero(np.isin(row_supervision.roles_L, SUPERVISED_ROLES))
        from_gt_S = np.array([segment.target.context == "gt" for segment in row.segments])
        coord_in_N_K = np.searchsorted(position_N, row_supervision.coord_pos_K)
        return cls(
            position_N=torch.from_numpy(position_N),
            label_N=torch.from_numpy(row.token_ids_L[position_N].astype(np.int64)),
            role_N=torch.from_numpy(row_supervision.roles_L[position_N]),
            text_weight_N=torch.from_numpy(row_supervision.text_weight_L[position_N].astype(np.float32)),
            from_gt_N=torch.from_numpy(from_gt_S[row_supervision.segment_L[position_N]]),
            coord_in_N_K=torch.from_numpy(coord_in_N_K),
            coord_bin_K=torch.from_numpy(row_supervision.coord_bin_K),
            box_in_K_M4=torch.from_numpy(np.searchsorted(row_supervision.coord_pos_K, row_supervision.box_pos_M4)),
            box_bin_M4=torch.from_numpy(row_supervision.box_bin_M4),
        )

    def to(self, device: torch.device) -> SupervisionTensors:
        """The same on ``device``."""
        return move(self, device)


@dataclass(frozen=True, slots=True, eq=False)
class ObjectiveContext:
    """Row supervision, what the head says where the modules asked, and the step's global denominators.

    A module reaches only what its own ``wants`` asked for; anything else is a LookupError or not there. U positions
    scored against the vocabulary, K coordinate slots, G text positions of the text gate.
    """

    supervision: SupervisionTensors
    query: HeadQuery
    scores: HeadScores
    counts: SupervisionCounts

    def vocab_lse_U(self, temperature: float = 1.0) -> torch.Tensor:
        """logsumexp(z/τ) over the vocabulary: (U,)."""
        return self.scores.vocab_lse_TU[self._index(temperature)]

    def label_ce_U(self) -> torch.Tensor:
        """Cross-entropy of the label over the vocabulary: (U,)."""
        return self.vocab_lse_U() - self.scores.label_logit_U

    def slot_vocab_lse_K(self, temperature: float = 1.0) -> torch.Tensor:
        """logsumexp(z/τ) over the vocabulary at the coordinate slots: (K,)."""
        if len(self.query.slot_in_U_K) != len(self.supervision.coord_in_N_K):
            raise LookupError(
                "the coordinate slots were not scored against the vocabulary: no module wanted them in vocab_N"
            )
        return self.vocab_lse_U(temperature)[self.query.slot_in_U_K]

    def slot_logits_KB(self) -> torch.Tensor:
        """Fenced logits of the 1000 coordinate tokens at the coordinate slots: (K, B)."""
        if len(self.query.slot_in_N_K) != len(self.supervision.coord_in_N_K):
            raise LookupError("the coordinate logits were not computed: no module wanted coord_logits")
        return self.scores.coord_logit_KB

    def text_gate_lse_G(self, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """logsumexp(z/τ) over the vocabulary and over the coordinate tokens, at the text gate's positions: (G,)."""
        index = self._index(temperature)
        return self.scores.vocab_lse_TU[index, self.query.text_gate_in_U_G], self.scores.coord_lse_TG[index]

    def _index(self, temperature: float) -> int:
        if temperature not in self.query.temperatures:
            raise LookupError(
                f"no module wanted logsumexps at temperature {temperature}, only {self.query.temperatures}"
            )
        return self.query.temperatures.index(temperature)


@dataclass(frozen=True, slots=True, eq=False)
class Wants:
    """One module's needs, over a row's N supervised positions.

    ``vocab_N`` mask: logsumexp over the vocabulary, and the label's logit; ``text_gate_N`` mask, within ``vocab_N``:
    logsumexp over the coordinate columns too; ``coord_logits``: the 1000 logits at every coordinate slot;
    ``temperatures`` of the logsumexps.
    """

    vocab_N: torch.Tensor | None = None
    text_gate_N: torch.Tensor | None = None
    coord_logits: bool = False
    temperatures: frozenset[float] = frozenset()


def head_query(supervision: SupervisionTensors, trained: Sequence[Wants], measured: Sequence[Wants] = ()) -> HeadQuery:
    """Join the needs of modules with a loss (``trained``) and of those that only measure.

    Made where the supervision is, on the CPU before the row goes to the device: reading masks there costs a wait.
    """
    num = len(supervision.position_N)
    none_N = torch.zeros(num, dtype=torch.bool, device=supervision.position_N.device)
    trained_N, text_gate_N = _union(trained, "vocab_N", none_N), _union((*trained, *measured), "text_gate_N", none_N)
    measured_N = _union(measured, "vocab_N", none_N) & ~trained_N
    vocab_in_N_U = torch.cat([_positions(trained_N), _positions(measured_N)])
    in_U_N = torch.full((num,), -1, device=none_N.device)
    in_U_N[vocab_in_N_U] = torch.arange(len(vocab_in_N_U), device=none_N.device)
    slot_in_N_K = supervision.coord_in_N_K
    slot_in_U_K = in_U_N[slot_in_N_K]
    coord_logits = any(wants.coord_logits for wants in (*trained, *measured))
    scored_N = trained_N | measured_N
    if coord_logits:
        scored_N[slot_in_N_K] = True
    return HeadQuery(
        vocab_in_N_U=vocab_in_N_U,
        slot_in_U_K=slot_in_U_K if bool((slot_in_U_K >= 0).all()) else slot_in_U_K[:0],
        text_gate_in_U_G=in_U_N[_positions(text_gate_N)],
        slot_in_N_K=slot_in_N_K if coord_logits else slot_in_N_K[:0],
        num_trained=int(trained_N.sum()),
        num_scored=int(scored_N.sum()),
        temperatures=tuple(sorted(set().union(*(wants.temperatures for wants in (*trained, *measured))))),
    )


def _union(all_wants: Sequence[Wants], field: str, none_N: torch.Tensor) -> torch.Tensor:
    mask_N = none_N.clone()
    for wants in all_wants:
        wanted_N = getattr(wants, field)
        if wanted_N is not None:
            mask_N |= wanted_N
    return mask_N


def _positions(mask_N: torch.Tensor) -> torch.Tensor:
    return torch.nonzero(mask_N)[:, 0]
