"""Loads of experts as the SDK gives them."""

from __future__ import annotations

import numpy as np
import pytest

from rolemesh.coordinator.sdk.values.experts import LayerLoads
from rolemesh.rpc.calls.expert_loads import loads_message
from rolemesh.rpc.errors import InternalError
from rolemesh.v1 import experience_pb2


@pytest.mark.filterwarnings("error")
def test_loads_are_choices_over_the_mean_of_their_layer() -> None:
    told = loads_message({1: [6, 2, 4], 5: [0, 0, 0]})
    loads = LayerLoads.of(told)
    assert loads.layers.tolist() == [1, 5]
    assert loads.choices.dtype == np.int64
    np.testing.assert_array_equal(loads.load, [[1.5, 0.5, 1.0], [np.nan] * 3])
    assert "<td>1.5</td><td>0</td><td>0.5</td><td>1</td>" in loads._repr_html_()


@pytest.mark.filterwarnings("error")
def test_a_model_without_experts_has_no_loads() -> None:
    loads = LayerLoads.of([])
    assert loads.layers.shape == (0,)
    assert loads.choices.shape == loads.load.shape == (0, 0)


def test_a_service_that_tells_what_cannot_be_is_refused() -> None:
    with pytest.raises(InternalError, match=r"contract .* expert_loads\[0\]\.choices holds -1"):
        LayerLoads.of([experience_pb2.LayerLoads(layer=1, choices=[1, -1])])
