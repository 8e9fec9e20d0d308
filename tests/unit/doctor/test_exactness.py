"""The doctor's comparisons notice what they are for."""

from __future__ import annotations

import pytest
import torch

from coordexp.doctor.exactness import LIMIT, SCORE_LIMIT, attention_error, head_errors, packed_row_error
from coordexp.modeling import attention, inputs
from coordexp.objective import head
from support.tiny_run import gt_segments, load_tiny

CPU = torch.device("cpu")


def test_attention_that_leaks_between_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_tiny()
    segments = gt_segments(loaded, 3)
    assert packed_row_error(loaded, segments, CPU) < 1e-5
    separate = inputs.row_arguments
    monkeypatch.setattr(inputs, "row_arguments", lambda lengths: separate([sum(lengths)]))
    assert packed_row_error(loaded, segments, CPU) > 0.05


def test_a_kernel_with_another_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = attention.KERNELS["packed"]
    assert attention_error("packed", True, torch.float32, CPU) < 1e-5
    monkeypatch.setitem(
        attention.KERNELS, "packed", lambda q, k, v, segments, scaling, dropout: kernel(q, k, v, segments, 0.1, dropout)
    )
    assert attention_error("packed", True, torch.float32, CPU) > 0.05


def test_a_head_whose_logits_are_rounded_to_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, gradients = head_errors(CPU, 16, 64, 4000)
    assert scores < SCORE_LIMIT / 5 and gradients < LIMIT[torch.bfloat16]
    product = head.product
    monkeypatch.setattr(head, "product", lambda a, b, *dtypes: product(a, b, *dtypes).bfloat16().float())
    assert head_errors(CPU, 16, 64, 4000)[0] > SCORE_LIMIT
