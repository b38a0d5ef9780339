"""Tensor ranks on q × q, d × q × q and q × q × q meshes train as one process does."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.covering import covering, sampled
from tests.distributed.group import Group
from tests.distributed.training import GEMMA, GPT2
from tests.train.models import TINY
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.models.presets import preset, preset_names
from tightfit.prove.check_target import CheckTarget, miniature
from tightfit.prove.equivalence import Verdict
from tightfit.prove.equivalence_check import checked
from tightfit.train import step

Make = Callable[[int], Group]
CPU = torch.device("cpu")
SQUARE = Layout(tensor=4, tensor_mesh="2d", micro_batch=4)
NINE = Layout(tensor=9, tensor_mesh="2d", micro_batch=3)
DEEP = Layout(tensor=8, tensor_mesh="2.5d", tensor_depth=2, micro_batch=4)
CUBE = Layout(tensor=8, tensor_mesh="3d", micro_batch=4)
BIASED = replace(GPT2, gated=True, activation="silu", rope=TINY.rope, qk_norm=True, qkv_bias=True, vocab_size=97)
JOINT = replace(TINY, qk_norm=True, qk_norm_joint=True, kv_heads=4)
ONE_KEY = replace(TINY, kv_heads=1, qk_norm=True, qkv_bias=True)
THREES: dict[str, Any] = {"hidden_size": 36, "heads": 6, "head_dim": 6, "mlp_size": 66}
"""Sizes for three ranks along an axis."""
SPECS = {
    "llama": replace(TINY, vocab_size=97),
    "gemma": GEMMA,
    "gpt2": GPT2,
    "biases": BIASED,
    "joint": JOINT,
    "one-key": ONE_KEY,
}
CASES = {
    **{f"2d-{name}": CheckTarget(spec, SQUARE) for name, spec in SPECS.items()},
    **{f"2.5d-{name}": CheckTarget(SPECS[name], DEEP) for name in ("llama", "gpt2", "one-key")},
    **{f"3d-{name}": CheckTarget(spec, CUBE) for name, spec in SPECS.items()},
    "2d-nine-gemma": CheckTarget(replace(GEMMA, **THREES, kv_heads=3), NINE),
    "2d-nine-biases": CheckTarget(replace(BIASED, **THREES, kv_heads=1), NINE),
    "2d-recomputed": CheckTarget(SPECS["gemma"], SQUARE, Levers(checkpoint_every=1), passes=2),
    "3d-recomputed": CheckTarget(SPECS["gemma"], CUBE, Levers(checkpoint_every=1), passes=2),
    **{
        f"2d-zero-{zero}-{name}": CheckTarget(SPECS[name], SQUARE.model_copy(update={"data": 2, "zero": zero}))
        for zero, name in ((0, "biases"), (1, "biases"), (3, "llama"), (3, "biases"))
    },
    **{
        f"2d-stages-{name}": CheckTarget(SPECS[name], SQUARE.model_copy(update={"pipeline": 2} | fields), passes=2)
        for name, fields in (
            ("gemma", {}),
            ("llama", {"schedule": "2bw"}),
            ("gpt2", {}),
            ("one-key", {"schedule": "gpipe"}),
        )
    },
    "2d-stages-interleaved": CheckTarget(
        replace(SPECS["biases"], layers=4),
        SQUARE.model_copy(update={"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2}),
        Levers(checkpoint_every=1),
        passes=2,
    ),
    "2.5d-stages": CheckTarget(SPECS["gpt2"], DEEP.model_copy(update={"pipeline": 2}), passes=2),
    "3d-stages": CheckTarget(SPECS["gemma"], CUBE.model_copy(update={"pipeline": 2}), passes=2),
    **{
        f"{kind}-{way}-{name}": CheckTarget(SPECS[name], layout.model_copy(update={"context": 2} | fields))
        for kind, layout in (("2d", SQUARE), ("3d", CUBE))
        for way, fields in (("ring", {"ring": 2}), ("heads", {"zero": 3}))
        for name in ("llama", "gemma", "gpt2", "one-key")
    },
    "2d-ring-stages": CheckTarget(
        SPECS["llama"], SQUARE.model_copy(update={"context": 2, "ring": 2, "pipeline": 2}), passes=2
    ),
    "2d-stages-zero-1": CheckTarget(
        SPECS["llama"], SQUARE.model_copy(update={"pipeline": 2, "data": 2, "zero": 1}), passes=2
    ),
}


@sampled(3)
@pytest.mark.parametrize("name", covering(CASES, costly=lambda target: target.layout.ranks > 8))
def test_a_mesh_of_tensor_ranks_trains_as_one_process_does(group: Make, name: str) -> None:
    """Loss, every gradient, every weight after the step; copies to the bit."""
    target = CASES[name]
    verdict = group(target.layout.ranks).run(checked, CPU, target, 1)[0]
    assert verdict.same, verdict


FAMILIES = {spec.family: spec for spec in map(preset, preset_names()) if spec.experts is None and spec.latent is None}


@pytest.mark.thorough
def test_every_dense_family_is_split(group: Make) -> None:
    """In miniature, as `tightfit check` does it."""
    for family, spec in FAMILIES.items():
        target = miniature(CheckTarget(spec, SQUARE))
        verdict = group(4).run(checked, CPU, target, 1)[0]
        assert verdict.same, (family, verdict)


def test_a_sum_left_out_is_found(group: Make) -> None:
    """The check can fail: norms' gradients of some rows are not those of all."""
    verdict = group(4).run(checked_without_sums, CheckTarget(SPECS["llama"], SQUARE))[0]
    assert verdict.first is not None
    assert verdict.first.kind == "gradient"
    assert "norm" in verdict.first.name


def checked_without_sums(target: CheckTarget) -> Verdict:
    with patch.object(step, "sum_partial_gradients", lambda model: None):
        return checked(CPU, target, 1)
