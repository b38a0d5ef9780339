"""Cases of every family: each with a lever or two, so that all levers are met, and each a few seconds on an H200.

Models too large for one GPU come with a few of their layers. The last rows take four layers of 8B at 32 768 tokens and
move more and more to the host: what is not hidden there shows from one row to the next.
"""

from collections.abc import Iterator
from typing import Any

from benchmarks.truth.case import Case

PURE: dict[str, Any] = {"precision": "pure-bf16"}
BACK = "update_in_backward=true"


def _of(model: str, length: int, rows: int, more: str = "", **others: Any) -> Case:
    return Case(model=model, sequence_length=length, micro_batch=rows, more=more, is_family=True, **others)


def family_cases() -> Iterator[Case]:
    """All of them."""
    yield from _plain_attention()
    yield from _windows_and_caps()
    yield from _layer_norms()
    yield from _routed()
    yield from _on_the_host()
    yield from _second_round()
    yield from _small_steps()
    yield from _third_round()
    yield from _fourth_round()
    yield from _fifth_round()
    yield from _sixth_round()


def _plain_attention() -> Iterator[Case]:
    """Llama, Mistral, Qwen and Phi: one attention kernel, several head sizes, biases and norms of heads."""
    yield _of("smollm2-1.7b", 2048, 4)
    yield _of("mistral-7b", 4096, 1, **PURE)
    yield _of("qwen2.5-0.5b", 4096, 4)
    yield _of("qwen2.5-1.5b", 3000, 3)
    yield _of("qwen2.5-1.5b", 4096, 2, "optimizer_states=factored", checkpoint_every=1)
    yield _of("qwen3-0.6b", 4096, 4, checkpoint_every=1)
    yield _of("qwen3-1.7b", 8192, 1, "matmul=fp8-tensor")
    yield _of("qwen3-4b", 8192, 1, checkpoint_every=1, **PURE)
    yield _of("phi-3-mini-4k", 4096, 2, **PURE)
    yield _of("phi-4-mini", 4096, 2, "checkpoint_keep=attention", checkpoint_every=1, **PURE)


def _windows_and_caps() -> Iterator[Case]:
    """Gemma and the first Mistral: windows, soft caps, heads of 256, norms after blocks, GeGLU."""
    yield _of("mistral-7b-v0.1", 8192, 1, checkpoint_every=1, **PURE)
    yield _of("gemma-2-2b", 4096, 2)
    yield _of("gemma-2-2b", 8192, 1, checkpoint_every=1)
    yield _of("gemma-2-2b", 4096, 2, "optimizer_states=8bit")
    yield _of("gemma-2-2b", 2048, 4, loss="plain", **PURE)
    yield _of("gemma-3-270m", 2048, 8)
    yield _of("gemma-3-1b", 8192, 2)
    yield _of("gemma-3-1b", 4096, 4, checkpoint_every=1)
    yield _of("gemma-3-1b", 8192, 1, "tiles=4")
    yield _of("gemma-3-4b", 4096, 2, **PURE)


def _layer_norms() -> Iterator[Case]:
    """GPT-2: LayerNorm, biases, an MLP without a gate, learned positions."""
    yield _of("gpt2", 1024, 32)
    yield _of("gpt2-large", 1024, 8, checkpoint_every=1)
    yield _of("gpt2-xl", 1024, 6)
    yield _of("gpt2-xl", 1024, 12, BACK)


def _routed() -> Iterator[Case]:
    """Many narrow experts, and a few wide ones."""
    yield _of("qwen3-30b-a3b", 4096, 2, layers=6, **PURE)
    yield _of("qwen3-30b-a3b", 4096, 2, layers=4, checkpoint_every=1)
    yield _of("mixtral-8x7b", 4096, 2, layers=4, **PURE)
    yield _of("mixtral-8x7b", 4096, 2, layers=2, checkpoint_every=1)


def _on_the_host() -> Iterator[Case]:
    """States, weights and checkpoints."""
    yield _of("qwen2.5-1.5b", 4096, 2, f"offload=optimizer {BACK}")
    yield _of("gemma-2-2b", 4096, 1, f"offload=weights {BACK}", checkpoint_every=1)
    four: dict[str, Any] = {"layers": 4, "checkpoint_every": 1}
    yield _of("llama-3.1-8b", 32_768, 1, BACK, **four)
    yield _of("llama-3.1-8b", 32_768, 1, "offload_checkpoints=true", **four)
    yield _of("llama-3.1-8b", 32_768, 1, f"offload=optimizer {BACK}", **four)
    yield _of("llama-3.1-8b", 32_768, 1, f"offload=weights {BACK}", **four)
    yield _of("llama-3.1-8b", 32_768, 1, f"offload=weights {BACK}", **four, **PURE)


def _second_round() -> Iterator[Case]:
    """Other shapes, predicted after the costs had learned from the first."""
    yield _of("smollm2-360m", 4096, 4)
    yield _of("smollm2-1.7b", 8192, 1, checkpoint_every=1)
    yield _of("mistral-7b", 8192, 1, checkpoint_every=1, **PURE)
    yield _of("qwen2.5-0.5b", 8192, 2, checkpoint_every=2)
    yield _of("qwen2.5-3b", 4096, 1)
    yield _of("qwen3-0.6b", 2048, 8)
    yield _of("qwen3-1.7b", 4096, 2, "checkpoint_keep=matmuls", checkpoint_every=1)
    yield _of("phi-4-mini", 2048, 2, **PURE)
    yield _of("gemma-2-2b", 8192, 1, **PURE)
    yield _of("gemma-2-2b", 2048, 2, BACK, checkpoint_every=1)
    yield _of("gemma-3-270m", 8192, 2)
    yield _of("gemma-3-1b", 2048, 8, "optimizer_states=8bit")
    yield _of("gemma-3-4b", 8192, 1, checkpoint_every=1, **PURE)
    yield _of("gpt2", 1024, 16)
    yield _of("gpt2-medium", 1024, 16)
    yield _of("gpt2-large", 1024, 16, **PURE)
    yield _of("qwen3-30b-a3b", 8192, 1, layers=4, **PURE)
    yield _of("mixtral-8x7b", 8192, 1, layers=3, **PURE)
    yield _of("qwen2.5-3b", 4096, 1, f"offload=optimizer {BACK}", checkpoint_every=1)
    yield _of("llama-3.1-8b", 16_384, 1, f"offload=weights {BACK}", layers=6, checkpoint_every=1)


def _small_steps() -> Iterator[Case]:
    """Steps that a host launches slower than a card makes them, predicted after the costs had learned of graphs."""
    yield _of("smollm2-360m", 1024, 4)
    yield _of("smollm2-360m", 2048, 2, "tiles=2")
    yield _of("qwen2.5-0.5b", 1024, 8, accumulation=2)
    yield _of("qwen2.5-1.5b", 2048, 1, "optimizer_states=8bit")
    yield _of("qwen3-0.6b", 4096, 1, checkpoint_every=2)
    yield _of("qwen3-1.7b", 2048, 2, "matmul=fp8-row")
    yield _of("gemma-2-2b", 1024, 2, **PURE)
    yield _of("gemma-3-1b", 2048, 2, checkpoint_every=1)
    yield _of("gpt2-medium", 1024, 4)
    yield _of("gpt2-large", 1024, 2, loss="plain")
    yield _of("qwen3-30b-a3b", 2048, 1, layers=4, **PURE)
    yield _of("mixtral-8x7b", 2048, 1, layers=2, **PURE)


def _third_round() -> Iterator[Case]:
    """Shapes, mixtures of levers and routed families that no row had when they were predicted."""
    yield _of("llama-3.2-1b", 4096, 3, "optimizer_states=8bit", checkpoint_every=2)
    yield _of("llama-3.2-3b", 3072, 2, **PURE)
    yield _of("llama-3.1-8b", 6144, 1, "matmul=fp8-row", layers=8)
    yield _of("llama-2-7b", 4096, 2, layers=6)
    yield _of("mistral-7b", 16_384, 1, "tiles=4", layers=8, checkpoint_every=1)
    yield _of("qwen2.5-7b", 4096, 2, layers=8)
    yield _of("qwen2.5-14b", 2048, 2, layers=6, loss="plain")
    yield _of("qwen2.5-0.5b", 16_384, 1, f"offload=optimizer {BACK}")
    yield _of("qwen3-8b", 8192, 1, "checkpoint_keep=attention", layers=8, checkpoint_every=1)
    yield _of("qwen3-4b", 2048, 4, "optimizer_states=factored", layers=16)
    yield _of("gemma-2-9b", 4096, 1, layers=8)
    yield _of("gemma-2-9b", 8192, 1, "num_checkpoints=3", layers=6, **PURE)
    yield _of("gemma-3-12b", 4096, 2, layers=6, checkpoint_every=1)
    yield _of("gemma-3-1b", 16_384, 1, "offload_checkpoints=true", checkpoint_every=1)
    yield _of("phi-4", 4096, 1, "matmul=fp8-tensor", layers=8)
    yield _of("phi-3-mini-4k", 2048, 3, "checkpoint_keep=matmuls", layers=16, checkpoint_every=1)
    yield _of("gpt2-medium", 1024, 24, checkpoint_every=1)
    yield _of("gpt2-xl", 1024, 4, "offload=optimizer", layers=24)
    yield _of("olmoe-1b-7b", 4096, 2, layers=6, **PURE)
    yield _of("deepseek-v2-lite", 4096, 2, layers=6, **PURE)
    yield _of("gpt-oss-20b", 4096, 2, layers=6, **PURE)
    yield _of("qwen3-30b-a3b", 8192, 1, "optimizer_states=8bit", layers=4, checkpoint_every=1)
    yield _of("mixtral-8x7b", 4096, 1, BACK, layers=3)


def _fourth_round() -> Iterator[Case]:
    """Others again, predicted after the costs had learned from the third."""
    yield _of("llama-3.2-3b", 6144, 1, checkpoint_every=3)
    yield _of("mistral-7b-v0.1", 4096, 2, layers=6)
    yield _of("qwen2.5-7b", 8192, 1, "checkpoint_keep=matmuls", layers=6, checkpoint_every=1)
    yield _of("qwen3-8b", 4096, 2, "matmul=fp8-tensor", layers=6)
    yield _of("qwen3-1.7b", 6144, 2, BACK, checkpoint_every=1)
    yield _of("gemma-2-9b", 2048, 2, "tiles=2", layers=8)
    yield _of("gemma-3-4b", 2048, 3, layers=17)
    yield _of("phi-3-medium-4k", 4096, 1, "optimizer_states=8bit", layers=6)
    yield _of("gpt2-large", 1024, 6, BACK)
    yield _of("smollm2-1.7b", 4096, 2, "offload=optimizer")
    yield _of("olmoe-1b-7b", 2048, 4, layers=8, checkpoint_every=1)
    yield _of("deepseek-v2-lite", 8192, 1, layers=5, checkpoint_every=1)
    yield _of("gpt-oss-20b", 8192, 1, layers=4, checkpoint_every=1, **PURE)
    yield _of("mixtral-8x7b", 2048, 3, BACK, layers=3)


def _fifth_round() -> Iterator[Case]:
    """Others again, predicted after the costs had learned from the fourth."""
    yield _of("llama-3.2-1b", 2048, 6)
    yield _of("llama-3.2-3b", 8192, 1, checkpoint_every=1)
    yield _of("llama-3.1-8b", 4096, 1, "optimizer_states=factored", layers=10)
    yield _of("llama-2-13b", 4096, 1, layers=6, **PURE)
    yield _of("mistral-7b", 2048, 4, "checkpoint_keep=attention", layers=8, checkpoint_every=1)
    yield _of("qwen2.5-14b", 4096, 1, f"offload=optimizer {BACK}", layers=5)
    yield _of("qwen2.5-3b", 8192, 1, BACK, checkpoint_every=1)
    yield _of("qwen2.5-1.5b", 2048, 4, "matmul=fp8-row")
    yield _of("qwen3-14b", 4096, 2, layers=4)
    yield _of("qwen3-0.6b", 8192, 2, "tiles=2")
    yield _of("qwen3-1.7b", 4096, 1, accumulation=4)
    yield _of("gemma-2-27b", 4096, 1, layers=4)
    yield _of("gemma-2-2b", 6144, 1, "optimizer_states=8bit")
    yield _of("gemma-3-27b", 2048, 2, layers=5, **PURE)
    yield _of("gemma-3-1b", 4096, 2, BACK)
    yield _of("gemma-3-4b", 8192, 1, "checkpoint_keep=matmuls", layers=12, checkpoint_every=1)
    yield _of("phi-4", 2048, 3, layers=6)
    yield _of("phi-3-mini-128k", 8192, 1, layers=12, checkpoint_every=1)
    yield _of("phi-4-mini", 6144, 1)
    yield _of("gpt2-medium", 1024, 8, BACK)
    yield _of("gpt2-xl", 1024, 8, checkpoint_every=2, **PURE)
    yield _of("gpt2-large", 1024, 12)
    yield _of("olmoe-1b-7b", 4096, 1, "optimizer_states=8bit", layers=5)
    yield _of("deepseek-v2-lite", 2048, 4, BACK, layers=4)
    yield _of("gpt-oss-20b", 2048, 3, layers=5)
    yield _of("qwen3-30b-a3b", 4096, 1, BACK, layers=5)
    yield _of("qwen3-235b-a22b", 2048, 2, layers=2, **PURE)
    yield _of("mixtral-8x7b", 4096, 1, "checkpoint_keep=attention", layers=3, checkpoint_every=1)


def _sixth_round() -> Iterator[Case]:
    """And others, predicted after the costs had learned from the fifth."""
    yield _of("smollm2-360m", 2048, 6, BACK)
    yield _of("llama-3.2-1b", 4096, 3, "optimizer_states=8bit")
    yield _of("llama-3.2-3b", 4096, 1, accumulation=3)
    yield _of("llama-2-7b", 4096, 2, BACK, layers=8)
    yield _of("llama-3.1-70b", 4096, 1, layers=2, **PURE)
    yield _of("mistral-7b", 8192, 1, "tiles=4", layers=6, checkpoint_every=1)
    yield _of("qwen2.5-0.5b", 2048, 10, "checkpoint_keep=attention", checkpoint_every=1)
    yield _of("qwen2.5-7b", 4096, 2, "matmul=fp8-tensor", layers=8)
    yield _of("qwen2.5-32b", 2048, 2, layers=4)
    yield _of("qwen3-4b", 4096, 2, BACK, layers=14, checkpoint_every=1)
    yield _of("qwen3-8b", 2048, 3, "optimizer_states=bf16", layers=9)
    yield _of("qwen3-32b", 4096, 1, f"offload=optimizer {BACK}", layers=3)
    yield _of("gemma-2-9b", 2048, 3, BACK, layers=8)
    yield _of("gemma-2-2b", 8192, 1, "checkpoint_keep=attention", checkpoint_every=1)
    yield _of("gemma-3-270m", 4096, 4, BACK)
    yield _of("gemma-3-12b", 4096, 1, layers=6, checkpoint_every=2)
    yield _of("phi-3-medium-4k", 2048, 2, BACK, layers=6)
    yield _of("phi-4-mini", 2048, 4, loss="plain")
    yield _of("gpt2-large", 1024, 10, BACK)
    yield _of("gpt2-xl", 1024, 5, BACK, checkpoint_every=1)
    yield _of("gpt2-medium", 1024, 24, accumulation=2)
    yield _of("olmoe-1b-7b", 2048, 4, layers=6, checkpoint_every=1)
    yield _of("deepseek-v2-lite", 4096, 1, layers=5, **PURE)
    yield _of("gpt-oss-20b", 4096, 1, BACK, layers=4)
    yield _of("qwen3-30b-a3b", 2048, 4, "optimizer_states=8bit", layers=4)
    yield _of("mixtral-8x7b", 2048, 2, BACK, layers=2)
