"""What tensor ranks on a mesh go with, and the sentences about what they do not."""

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from tests.train.models import TINY, TINY_ROUTED
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.rules.refusals import refused_by_trainer
from tightfit.jobs.rules.rule import Run
from tightfit.models.spec import ModelSpec

SQUARE = Layout(tensor=4, tensor_mesh="2d", micro_batch=4)
CUBE = Layout(tensor=8, tensor_mesh="3d", micro_batch=4)


def test_ranks_along_each_axis() -> None:
    assert SQUARE.tensor_axes == (1, 2, 2)
    assert CUBE.tensor_axes == (2, 2, 2)
    assert Layout(tensor=27, tensor_mesh="3d").tensor_axes == (3, 3, 3)
    deep = Layout(tensor=18, tensor_mesh="2.5d", tensor_depth=2)
    assert (deep.tensor_axes, deep.weight_ranks, deep.row_parts) == ((2, 3, 3), 9, 6)
    assert (Layout(tensor=4).tensor_axes, Layout(tensor=4).row_parts) == ((1, 1, 4), 1)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tensor": 8, "tensor_mesh": "2d"}, "has q × q ranks"),
        ({"tensor": 9, "tensor_mesh": "3d"}, "has q × q × q ranks"),
        ({"tensor": 1, "tensor_mesh": "2d"}, "q of at least 2"),
        ({"tensor": 8, "tensor_mesh": "2.5d", "tensor_depth": 3}, "has tensor_depth × q × q ranks"),
        ({"tensor": 4, "tensor_mesh": "2.5d"}, "2.5d meshes alone have a depth"),
        ({"tensor": 8, "tensor_mesh": "3d", "tensor_depth": 2}, "2.5d meshes alone have a depth"),
        ({"tensor": 4, "tensor_mesh": "2d", "pipeline": 2, "schedule": "zero-bubble"}, "send the blocks .* both times"),
        ({"tensor": 4, "tensor_mesh": "2d", "data": 2, "expert": 2}, "layout.expert is 2"),
    ],
)
def test_layouts_that_are_no_mesh(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Layout(**fields)


@pytest.mark.parametrize(
    ("spec", "layout", "levers", "words"),
    [
        (TINY_ROUTED, SQUARE, {}, "routes whole tokens to experts"),
        (replace(TINY, hidden_size=34), CUBE, {}, "34 hidden columns in 4"),
        (replace(TINY, heads=5, kv_heads=1), SQUARE, {}, "5 attention heads in 2"),
        (replace(TINY, heads=6, kv_heads=3, head_dim=8), SQUARE, {}, "3 key heads"),
        (TINY, SQUARE.model_copy(update={"micro_batch": 3}), {}, "deals out rows in 2 parts"),
        (TINY, CUBE.model_copy(update={"micro_batch": 2}), {}, "deals out rows in 4 parts"),
        (TINY, SQUARE, {"checkpoint_every": 1, "checkpoint_keep": "matmuls"}, "checkpoint_keep is matmuls"),
        (TINY, SQUARE, {"optimizer_states": "8bit"}, "do not divide rows cut in 2"),
        (TINY, SQUARE.model_copy(update={"context": 4}), {}, "2 query and 1 key heads, after 2 tensor ranks"),
    ],
)
def test_runs_that_a_mesh_refuses(spec: ModelSpec, layout: Layout, levers: dict[str, Any], words: str) -> None:
    sentence = refused_by_trainer(Run(layout=layout, levers=Levers(**levers), spec=spec))
    assert sentence is not None
    assert words in sentence


def test_runs_that_a_mesh_takes() -> None:
    joint = replace(TINY, qk_norm=True, qk_norm_joint=True, kv_heads=4)
    sharded = SQUARE.model_copy(update={"data": 2, "zero": 1})
    staged = CUBE.model_copy(update={"pipeline": 2, "context": 2})
    for spec, layout in ((TINY, SQUARE), (joint, CUBE), (replace(TINY, kv_heads=1), sharded), (TINY, staged)):
        assert refused_by_trainer(Run(layout=layout, levers=Levers(checkpoint_every=1), spec=spec)) is None
