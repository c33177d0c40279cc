"""The measured figures, how they are parted, and that the pages tell the errors that the script finds."""

from __future__ import annotations

from collections import defaultdict

import pytest

from bench.calibrate_plan import BOUNDS, errors, kernel, read, summary
from fewstep.costs.speed import coefficients
from tests.docs.prose import ROOT

WHOLE_RUNS = True


def test_every_second_row_of_a_kind_is_held_out_by_name():
    groups = defaultdict(list)
    for row in read():
        groups[row.quantity, row.kind].append(row)
    for (_, kind), found in groups.items():
        assert [row.name for row in found] == sorted(row.name for row in found)
        assert [row.held_out for row in found] == [kind == "layout" or bool(place % 2) for place in range(len(found))]
    kinds = {kind for quantity, kind in groups if quantity == "time"}
    assert kinds == {"kernel", "call", "update", "iteration", "layout"}


def test_fewer_coefficients_are_fitted_than_half_of_the_rows_they_are_fitted_to():
    rows = read()
    for quantity, num in (("time", len(BOUNDS)), ("memory", 1)):
        assert num < sum(row.quantity == quantity and not row.held_out for row in rows) / 2


def test_single_kernels_are_as_fast_as_was_measured():
    for row in read():
        if row.kind == "kernel" and row.held_out:
            assert kernel(row.spec, coefficients())[0] == pytest.approx(row.measured, rel=0.25), row.name


@pytest.mark.thorough
def test_the_page_tells_the_errors_that_the_script_finds():
    page, found = (ROOT / "docs" / "scaling.md").read_text(), errors(read(), coefficients())
    for quantity in ("time", "memory"):
        told = " | ".join(summary(found, quantity, held_out) for held_out in (False, True))
        assert f"| {quantity} | {told} |" in page
