"""What layers keep on a budget: the quickest choice there is, against trying all of them; and in the best order."""

from dataclasses import replace
from itertools import pairwise, permutations, product
from typing import Any

import pytest

from tightfit.errors import UserError
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.levers.checkpointing import rows_and_length
from tightfit.levers.policy.recompute import KEEP_LEVELS
from tightfit.memory.formulas.keeping import layer_levels, level_options
from tightfit.memory.formulas.layer import layer_kept
from tightfit.memory.formulas.local_shape import LocalShape, local_shape, shape_of_tokens
from tightfit.memory.formulas.rank import RankMemory
from tightfit.memory.formulas.stage import remembered_stage
from tightfit.memory.formulas.step import steps
from tightfit.models.presets import preset, preset_names
from tightfit.models.spec import ModelSpec

LLAMA, GEMMA, QWEN = preset("llama-3.1-8b"), preset("gemma-2-9b"), preset("qwen3-30b-a3b")
LONG = LocalShape(LLAMA, 1, 32768, 2)


def few(spec: ModelSpec, layers: int) -> ModelSpec:
    windowed = tuple(layer for layer in spec.window_layers if layer < layers)
    return replace(spec, layers=layers, window_layers=windowed)


def costs(shape: LocalShape, levels: tuple[str, ...], offload: bool) -> tuple[int, float]:
    """Bytes and seconds of a choice, added up layer by layer."""
    found = [level_options(shape, layer, offload)[KEEP_LEVELS.index(level)] for layer, level in enumerate(levels)]
    stays = shape.stream_bytes if offload else 0
    return stays + sum(option.bytes for option in found), sum(option.seconds for option in found)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("sizes", [(2, 512, 2), (1, 32768, 2), (1, 4096, 4)], ids=["short", "long", "fp32"])
@pytest.mark.parametrize("spec", [few(LLAMA, 5), few(GEMMA, 5), few(QWEN, 4)], ids=["llama", "gemma", "qwen-moe"])
def test_no_other_choice_within_the_budget_is_quicker(spec: ModelSpec, sizes: Any, offload: bool) -> None:
    """All 4ⁿ choices, for budgets from the least to everything."""
    shape = LocalShape(spec, *sizes)
    every = [costs(shape, levels, offload) for levels in product(KEEP_LEVELS, repeat=spec.layers)]
    least, most = min(size for size, _ in every), max(size for size, _ in every)
    for step in range(12):
        budget = least + (most - least) * step // 11
        levers = Levers(checkpoint_budget_bytes=budget, offload_checkpoints=offload)
        size, seconds = costs(shape, layer_levels(shape, levers, range(spec.layers)), offload)
        assert size <= budget
        assert seconds == pytest.approx(min(time for held, time in every if held <= budget), rel=1e-12)


@pytest.mark.parametrize("name", preset_names())
def test_levels_keep_more_and_compute_less(name: str) -> None:
    spec = preset(name)
    for layer in {0, spec.layers - 1}:
        shape = LocalShape(spec, 1, min(1024, spec.max_positions), 2)
        options = level_options(shape, layer)
        assert all(less.seconds > more.seconds for less, more in pairwise(options))
        assert options[0].bytes < options[1].bytes < options[2].bytes
        kept = [sum(one.bytes for one in layer_kept(shape, layer, level)) for level in KEEP_LEVELS]
        assert kept == [option.bytes for option in options]
        assert kept[3] == sum(one.bytes for one in layer_kept(shape, layer))


def test_attention_is_the_first_thing_worth_keeping_at_great_lengths() -> None:
    inputs = 32 * LONG.stream_bytes
    attention = 32 * sum(one.bytes for one in layer_kept(LONG, 0, "attention"))
    for budget, level in ((inputs, "nothing"), (attention, "attention"), (2**40, "everything")):
        assert set(layer_levels(LONG, Levers(checkpoint_budget_bytes=budget), range(32))) == {level}


def test_a_budget_below_the_inputs_gets_a_sentence() -> None:
    entry = LONG.stream_bytes
    with pytest.raises(UserError, match=f"but the inputs of 32 layers alone take {32 * entry}; give at least"):
        layer_levels(LONG, Levers(checkpoint_budget_bytes=32 * entry - 1), range(32))
    offloaded = Levers(checkpoint_budget_bytes=32 * entry - 1, offload_checkpoints=True)
    assert "everything" not in layer_levels(LONG, offloaded, range(32))


@pytest.mark.parametrize("update_in_backward", [False, True])
@pytest.mark.parametrize("budget_gb", [6, 9, 12])
def test_no_order_of_the_layers_needs_less(budget_gb: int, update_in_backward: bool) -> None:
    """Those that keep least come first; backward is fullest there in no other order of the same choice."""
    spec = few(LLAMA, 5)
    workload = Workload(spec=spec, sequence_length=32768, global_batch=1, precision="pure-bf16")
    levers = Levers(checkpoint_budget_bytes=budget_gb * 10**9, update_in_backward=update_in_backward)
    rank = RankMemory(workload, Layout(micro_batch=1), levers, 0)
    chosen = layer_levels(rank.shape, levers, range(spec.layers))
    assert len(set(chosen)) > 1
    assert list(chosen) == sorted(chosen, key=KEEP_LEVELS.index)
    peaks = {}
    for levels in set(permutations(chosen)):
        rank.stage = remembered_stage(rank.shape, rank.stage.span, levels, offloaded=0)
        peaks[levels] = max(sum(moment) for step in steps(rank) for moment in step.backward())
    assert peaks[chosen] == min(peaks.values())
    assert peaks[chosen] < peaks[chosen[::-1]]


LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"data": 4, "zero": 3, "expert": 2},
    {"tensor": 2},
    {"tensor": 2, "sequence_parallel": False},
    {"context": 4, "ring": 2},
)


@pytest.mark.parametrize("levers", [{}, {"tiles": 2}, {"matmul": "fp8-tensor"}], ids=["plain", "tiles", "fp8"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_run_chooses_by_the_shape_that_was_planned(layout: dict[str, Any], levers: dict[str, Any]) -> None:
    """A layer's input, one row under sequence parallelism, tells what the plan has known: else a budget is spent on
    other layers than were counted."""
    workload = Workload(spec=QWEN, sequence_length=512, global_batch=16)
    given, levers_ = Layout.model_validate({"micro_batch": 2, **layout}), Levers.model_validate(levers)
    tokens = 2 * 512 // given.context
    is_split = given.tensor > 1 and given.sequence_parallel
    read = rows_and_length(given, *((1, tokens // given.tensor) if is_split else (2, tokens // 2)))
    assert shape_of_tokens(QWEN, given, levers_, *read, 2, None) == local_shape(workload, given, levers_)
