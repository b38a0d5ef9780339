"""Formulas of adapters against the real step on fake tensors: what is allocated, by phase, of a frozen model's step."""

from dataclasses import replace
from typing import Any

import pytest

from tests.covering import covering, sampled, thorough
from tightfit.jobs.adapter import AdapterTraining, FrozenBase
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.fsdp2 import installed
from tightfit.memory.formulas.overheads import Overheads
from tightfit.memory.formulas.training import training_ledger
from tightfit.memory.ledger import Ledger, Phase
from tightfit.models.presets import preset
from tightfit.models.quantized.scheme import Scheme
from tightfit.prove.rehearsal import rehearse

PHASES: tuple[Phase, ...] = ("init", "forward", "loss", "backward", "optimizer")
CASES: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str, int]] = [
    ("llama-3.1-8b", {"rank": 16}, {}, {}, "bf16", 1),
    ("llama-3.1-8b", {"rank": 16, "bits": 4}, {}, {"checkpoint_every": 1}, "bf16", 1),
    ("llama-3.1-8b", {"rank": 16, "bits": 4}, {}, {}, "fp16", 2),
    ("llama-3.1-8b", {"rank": 8, "bits": 8, "targets": ["q", "v"]}, {}, {"checkpoint_every": 2}, "bf16", 2),
    ("llama-3.1-8b", {"rank": 16, "targets": ["gate", "up"]}, {"data": 8}, {"checkpoint_every": 1}, "bf16", 2),
    ("qwen3-8b", {"rank": 64}, {}, {"loss": "plain"}, "fp32", 1),
    ("gemma-2-9b", {"rank": 16, "bits": 4}, {}, {"checkpoint_every": 1, "checkpoint_keep": "attention"}, "bf16", 1),
    ("gpt2-xl", {"rank": 16}, {}, {}, "pure-bf16", 1),
    ("llama-3.1-8b", {"rank": 16, "dropout": 0.1}, {}, {"optimizer_states": "8bit"}, "bf16", 1),
    ("llama-3.1-8b", {"rank": 16, "bits": 4}, {}, {"tiles": 4, "checkpoint_every": 1}, "bf16", 1),
    ("llama-3.1-8b", {"rank": 16, "bits": 4}, {}, {"checkpoint_every": 1, "offload_checkpoints": True}, "bf16", 1),
    ("llama-3.2-1b", {"rank": 16, "bits": 4}, {}, {"checkpoint_budget_bytes": 700 * 2**20}, "bf16", 1),
]


def both(
    model: str, settings: dict[str, Any], layout: Layout, levers: Levers, precision: Any, accumulation: int, layers: int
) -> tuple[Ledger, Ledger]:
    """What formulas say, and the simulation."""
    spec = replace(preset(model), layers=layers)
    spec = replace(spec, window_layers=tuple(layer for layer in spec.window_layers if layer < layers))
    workload = Workload(
        spec=spec,
        sequence_length=4096 if levers.tiles > 1 else 1024,
        global_batch=2 * layout.data * accumulation,
        precision=precision,
        adapted=AdapterTraining.model_validate(settings).adapted(),
    )
    found = training_ledger(workload, layout, levers, Overheads(context_bytes=0, slack_share=0, fsdp2=installed()))
    return found, rehearse(workload, layout, levers)


@sampled(5)
@pytest.mark.parametrize(("model", "settings", "layout", "levers", "precision", "accumulation"), covering(CASES))
def test_the_peak_is_the_simulations(
    model: str,
    settings: dict[str, Any],
    layout: dict[str, Any],
    levers: dict[str, Any],
    precision: Any,
    accumulation: int,
) -> None:
    given = Layout.model_validate({"micro_batch": 2, **layout}), Levers.model_validate(levers)
    found, truth = both(model, settings, *given, precision, accumulation, layers=4)
    assert found.peak_allocated_bytes() == pytest.approx(truth.peak_allocated_bytes(), rel=0.01)
    for phase in PHASES:
        assert found.allocated_bytes(phase) == pytest.approx(truth.allocated_bytes(phase), rel=0.06), phase


PACKED, PLAIN = {"rank": 16, "bits": 4}, {"rank": 16}


@pytest.mark.parametrize(("settings", "layers"), [(PACKED, 8), thorough(PACKED, 32), thorough(PLAIN, 32)])
def test_a_deep_model_is_within_a_percent(settings: dict[str, Any], layers: int) -> None:
    layout, levers = Layout(micro_batch=1), Levers(checkpoint_every=1)
    found, truth = both("llama-3.1-8b", settings, layout, levers, "bf16", 2, layers=layers)
    assert found.peak_allocated_bytes() == pytest.approx(truth.peak_allocated_bytes(), rel=0.01)
    weights = {line.detail: line.bytes for line in found.lines if (line.component, line.phase) == ("weights", "init")}
    params = replace(preset("llama-3.1-8b"), layers=layers).params()
    if settings is PLAIN:
        assert weights["frozen, under adapters"] == 2 * params
    else:  # 4 bits, a float16 scale and a byte's zero point for 64, and embeddings and norms in 16 bits
        linear = layers * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336)
        assert weights["frozen, under adapters"] == linear * 4 // 8 + linear * 3 // 64 + 2 * (params - linear)
    trained = 41_943_040 * layers // 32
    assert weights[""] == 2 * trained
    assert found.allocated_bytes("optimizer") - found.allocated_bytes("init") < 4 * 2 * trained


def test_only_adapters_have_gradients_states_and_a_checkpoint() -> None:
    spec, layout = preset("llama-3.1-8b"), Layout(micro_batch=1)
    adapted = AdapterTraining(rank=16, bits=4).adapted()
    workload = Workload(spec=spec, sequence_length=1024, global_batch=1, adapted=adapted)
    ledger = training_ledger(workload, layout, Levers())
    for component, each_bytes in (("master weights", 4), ("optimizer states", 8)):
        lines = [
            line for line in ledger.lines if (line.component, line.phase, line.place) == (component, "init", "gpu")
        ]
        assert next(line.bytes for line in lines if not line.detail) == each_bytes * 41_943_040
    written = sum(line.bytes for line in ledger.lines if line.detail == "to be written")
    assert written == (2 + 4 + 8) * 41_943_040


def test_codes_without_a_kernel_take_more_on_their_way() -> None:
    """NF4 is expanded through indices and float32: 9 bytes a weight, of which plans count 10."""
    spec, layout, levers = replace(preset("llama-3.1-8b"), layers=2), Layout(micro_batch=1), Levers(checkpoint_every=1)
    workload = Workload(spec=spec, sequence_length=1024, global_batch=1)
    read, unread = (
        replace(workload, adapted=AdapterTraining(rank=16).adapted(FrozenBase(scheme=scheme)))
        for scheme in (Scheme(bits=4, group=64), Scheme(kind="nf4", bits=4, group=64))
    )
    alone = Overheads(context_bytes=0, slack_share=0, fsdp2=installed())
    found, less = (training_ledger(each, layout, levers, alone).peak_allocated_bytes() for each in (unread, read))
    truth = rehearse(unread, layout, levers).peak_allocated_bytes()
    assert truth * 0.99 < found < truth * 1.03
    assert found - less > 5 * 4096 * 14336
