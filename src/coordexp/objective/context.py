"""What the objective sees: what the head says at a packed row's supervised positions, and what should stand there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

import numpy as np
import torch

from coordexp.objective.scores import HeadQuery, HeadScores, move
from coordexp.packing import supervise_row
from coordexp.records import PackedRow, TokenRole, TrainingTarget

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
