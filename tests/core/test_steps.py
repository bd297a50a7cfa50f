"""Steps as columns: what was not said takes no memory, and neither do picked rows."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.steps import Step, Steps

STEPS = Steps.of(Step(n, step_time_s=n / 2, loss=1.0 if n % 2 else None) for n in range(1, 7))


@pytest.mark.parametrize(
    "rows", [slice(1, 4), np.array([1, 2, 3]), np.array([0, 1, 1, 1, 0, 0], dtype=np.bool_)]
)
def test_rows_are_picked_by_slice_numbers_or_mask(rows: slice):
    picked = STEPS.select(rows)
    assert list(picked.index) == [2, 3, 4] and list(picked["step_time_s"]) == [1.0, 1.5, 2.0]
    assert np.isnan(picked["loss"]).tolist() == [True, False, True]
    assert np.isnan(picked["mfu"]).all() and len(picked["mfu"]) == 3
    assert picked.known("loss") and not picked.known("mfu")
    assert (len(picked.averaged_over), len(picked.skipped)) == (3, 3)
    assert list(picked.select(np.array([2]))["step_time_s"]) == [2.0]


def test_a_repeated_value_is_not_copied_for_each_picked_row():
    steps = Steps(STEPS.index, np.broadcast_to(np.int64(10), 6), STEPS.skipped, STEPS.columns)
    picked = steps.select(np.array([0, 5]))
    assert list(picked.averaged_over) == [10, 10] and picked.averaged_over.strides == (0,)
    assert len(steps.select(np.array([], dtype=np.int64)).averaged_over) == 0


def test_a_name_of_no_column_is_refused():
    with pytest.raises(KeyError):
        STEPS.select(slice(0, 2))["speed"]
