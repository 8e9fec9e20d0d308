"""The fuzzer finds what is broken and names it; a small share of its cases runs with every test run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("fuzz_targets.py")
# Raised by hand where time allows: COORDEXP_FUZZ_EXAMPLES=100000 pytest tests/fuzz
EXAMPLES = int(os.environ.get("COORDEXP_FUZZ_EXAMPLES", "1500"))
PARTS = 6


def run_case(seed: int, case: int) -> None:
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        import fuzz_targets
    finally:
        sys.path.remove(str(SCRIPT.parent))
    fuzz_targets.run_case(seed, case)


@pytest.mark.parametrize("part", range(PARTS))
def test_a_share_of_the_fuzzer_s_cases(part: int) -> None:
    for case in range(part, EXAMPLES, PARTS):
        try:
            run_case(0, case)
        except Exception as error:
            error.add_note(f"again with: python {SCRIPT} --seed 0 --case {case}")
            raise


def test_a_failing_case_is_named_and_ends_the_run(tmp_path: Path) -> None:
    """With a parser that forgets to count dropped entries, the run stops at a case that runs alone as well."""
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import sys, runpy\n"
        "from dataclasses import replace\n"
        "import coordexp.parsing, coordexp.parsing.parse as parse\n"
        "whole = parse.parse_rollout\n"
        "coordexp.parsing.parse_rollout = lambda ids, vocab, **k: replace(whole(ids, vocab, **k), dropped={})\n"
        "sys.argv = sys.argv[1:]\n"
        "sys.path.insert(0, str(__import__('pathlib').Path(sys.argv[0]).parent))\n"
        "import fuzz_targets\n"
        "from unittest import mock\n"
        "for seed_case in range(200):\n"
        "    done, failure = fuzz_targets.run_chunk(0, seed_case, 1)\n"
        "    if failure: print('failed', failure[0], failure[1][-300:]); sys.exit(3)\n"
    )
    found = subprocess.run([sys.executable, broken, SCRIPT], capture_output=True, text=True, timeout=300)
    assert found.returncode == 3 and "AssertionError" in found.stdout, found.stderr


def test_the_command_line_reports_how_much_it_ran() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--examples", "30", "--jobs", "1", "--seed", "9"],
                          capture_output=True, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "30 cases of seed 9 hold every invariant" in done.stdout
