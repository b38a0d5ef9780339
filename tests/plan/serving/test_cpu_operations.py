"""Operations of a layer on a CPU, as torch dispatches them in an engine's steps."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.covering import sampled
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.presets import preset
from tightfit.models.spec import ModelSpec
from tightfit.plan.serving.cpu_operations import runs_joint, step_operations
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.forward.runner import Runner
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling

JOINT = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma")
ROUTED = ("mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "gpt-oss", "deepseek-v2", "deepseek-v3")
OWN = ("gpt2", "gemma2", "gemma3", *ROUTED)
NEAR = 0.1
"""Versions of torch and windows of layers change a few."""
MORE_LAYERS = 2


class Counting(TorchDispatchMode):
    """How many operations are called."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def counted(spec: ModelSpec) -> dict[str, int]:
    """Operations of an engine's step of a prompt, and of a step of one token."""
    model = Decoder(spec)
    init_weights(model)
    engine = Engine(model, None, EngineConfig(max_sequences=2, cache_bytes=2**20, prefix_cache=False))
    assert isinstance(engine.runner, Runner)
    assert (engine.runner.program is not None) == runs_joint(spec)
    engine.submit(Request(id="a", prompt=[1, 2, 3, 4], sampling=Sampling(max_tokens=4, temperature=0)))
    counts = {}
    for step in ("prompt", "warm", "single"):
        with torch.inference_mode(), Counting() as counting:
            engine.step()
        counts[step] = counting.count
    return counts


@sampled(5)
@pytest.mark.parametrize("family", [*JOINT, *OWN])
def test_a_layer_is_as_many_operations_as_are_called(family: str) -> None:
    """By two models of which one has two layers more, so that what is outside of layers is not counted."""
    few = preset(f"tiny-{family}")
    more = replace(few, layers=few.layers + MORE_LAYERS)
    measured = {step: counted(more)[step] - count for step, count in counted(few).items()}
    for step in ("prompt", "single"):
        told = [step_operations(spec, prompts=step == "prompt") for spec in (few, more)]
        assert told[1] - told[0] == pytest.approx(measured[step], rel=NEAR)


def test_which_families_run_over_joint_weights() -> None:
    assert [family for family in (*JOINT, *OWN) if runs_joint(preset(f"tiny-{family}"))] == [*JOINT]


def test_more_of_a_trait_is_more_operations() -> None:
    plain = preset("tiny-gpt2")
    several = (
        {"layers": 2 * plain.layers},
        {"sandwich_norms": True},
        {"qk_norm": True},
        {"gated": True},
        {"sinks": True},
        {"attention_softcap": 30.0},
        {"experts": preset("tiny-mixtral").experts},
    )
    for change in several:
        assert step_operations(replace(plain, **change), prompts=False) > step_operations(plain, prompts=False)
    experts = preset("tiny-mixtral").experts
    assert experts is not None
    wide = replace(preset("tiny-mixtral"), experts=replace(experts, count=experts.count + 10))
    ten_more = step_operations(wide, prompts=False) - step_operations(preset("tiny-mixtral"), prompts=False)
    assert ten_more == wide.layers * 10 * 3
