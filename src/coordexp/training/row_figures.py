"""What rows leave on the device for the host to look at: all of it at once, because every look waits for the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from coordexp.objective import HeadQuery, HeadScores


@dataclass(frozen=True, slots=True)
class RowFigures:
    """One row: its share of each term, and how many of its scored positions were broken or clamped, as the host knows
    them."""

    shares: Mapping[str, float]
    num_scored: int
    nonfinite: int
    clamped: int

    @property
    def all_broken(self) -> bool:
        """Whether no supervised position of the row has a finite loss."""
        return self.num_scored > 0 and self.nonfinite == self.num_scored


class FiguresOnDevice:
    """The rows of one step, until the host looks."""

    def __init__(self) -> None:
        self._rows: list[tuple[tuple[str, ...], int, torch.Tensor]] = []

    def note(
        self, terms: Mapping[str, torch.Tensor], scores: Sequence[HeadScores], queries: Sequence[HeadQuery]
    ) -> None:
        """Keep a row's figures where they are. ``terms``: name → scalar."""
        counted = [
            torch.stack([getattr(one, name).sum() for one in scores]).sum() for name in ("nonfinite_N", "clamped_N")
        ]
        figures_F = torch.stack([value.detach().to(torch.float64) for value in (*counted, *terms.values())])
        self._rows.append((tuple(terms), sum(query.num_scored for query in queries), figures_F))

    def look(self) -> Iterator[RowFigures]:
        """Each row that was noted since the last look, in order. Waits for the device once."""
        rows, self._rows = self._rows, []
        if not rows:
            return
        figures = iter(torch.cat([figures_F for _, _, figures_F in rows]).tolist())
        for names, num_scored, _ in rows:
            nonfinite, clamped = int(next(figures)), int(next(figures))
            yield RowFigures({name: next(figures) for name in names}, num_scored, nonfinite, clamped)
