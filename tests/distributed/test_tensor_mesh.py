"""Tensor ranks on q × q, d × q × q and q × q × q meshes train as one process does."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.distributed.group import Group
from tests.distributed.training import GEMMA, GPT2
from tests.train.models import TINY
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.prove.check_target import CheckTarget
from tightfit.prove.equivalence_check import checked

Make = Callable[[int], Group]
CPU = torch.device("cpu")
SQUARE = Layout(tensor=4, tensor_mesh="2d", micro_batch=4)
NINE = Layout(tensor=9, tensor_mesh="2d", micro_batch=3)
DEEP = Layout(tensor=8, tensor_mesh="2.5d", tensor_depth=2, micro_batch=4)
CUBE = Layout(tensor=8, tensor_mesh="3d", micro_batch=4)
BIASED = replace(GPT2, gated=True, activation="silu", rope=TINY.rope, qk_norm=True, qkv_bias=True, vocab_size=97)
JOINT = replace(TINY, qk_norm=True, qk_norm_joint=True, kv_heads=4)
ONE_KEY = replace(TINY, kv_heads=1, qk_norm=True, qkv_bias=True)
THREES = {"hidden_size": 36, "heads": 6, "head_dim": 6, "mlp_size": 66}
"""Sizes for three ranks along an axis."""
SPECS = {"llama": replace(TINY, vocab_size=97), "gemma": GEMMA, "gpt2": GPT2, "biases": BIASED, "joint": JOINT,
         "one-key": ONE_KEY}  # fmt: skip
CASES = {
    **{f"2d-{name}": CheckTarget(spec, SQUARE) for name, spec in SPECS.items()},
    **{f"2.5d-{name}": CheckTarget(SPECS[name], DEEP) for name in ("llama", "gpt2", "one-key")},
    **{f"3d-{name}": CheckTarget(spec, CUBE) for name, spec in SPECS.items()},
    "2d-nine-gemma": CheckTarget(replace(GEMMA, **THREES, kv_heads=3), NINE),
    "2d-nine-biases": CheckTarget(replace(BIASED, **THREES, kv_heads=1), NINE),
    "2d-recomputed": CheckTarget(SPECS["gemma"], SQUARE, Levers(checkpoint_every=1), passes=2),
    "3d-recomputed": CheckTarget(SPECS["gemma"], CUBE, Levers(checkpoint_every=1), passes=2),
    **{
        f"2d-zero-{zero}": CheckTarget(SPECS["biases"], SQUARE.model_copy(update={"data": 2, "zero": zero}))
        for zero in (0, 1, 3)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_mesh_of_tensor_ranks_trains_as_one_process_does(group: Make, name: str) -> None:
    """Loss, every gradient, every weight after the step; copies to the bit."""
    target = CASES[name]
    verdict = group(target.layout.ranks).run(checked, CPU, target, 1)[0]
    assert verdict.same, verdict
