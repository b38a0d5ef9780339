"""The supported families: one row each, with transformers' classes and how each is accelerated.

Classes are matched by full name, so a model's own copy of a modeling file (`trust_remote_code`) does not match.
Subclasses match too, as long as they keep the forward (FSDP2 makes some).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from tightfit.errors import UserError
from tightfit.hf.head import Head
from tightfit.hf.mlps import Experts, GatedMlp, TanhGelu
from tightfit.hf.norms import LayerNorm, RmsNorm
from tightfit.hf.replacement import Block
from tightfit.hf.rotary import Rotary


@dataclass(frozen=True)
class Family:
    """A row: classes of `transformers.models.<folder>`, and for each how it is accelerated."""

    name: str
    folder: str
    blocks: Mapping[str, Block]


CAPPED_HEAD = Head(softcap="final_logit_softcapping")
GEMMA_NORM = RmsNorm(eps="eps", offset=1.0)

FAMILIES = (
    Family(
        "Llama",
        "llama",
        {
            "LlamaForCausalLM": Head(),
            "LlamaRMSNorm": RmsNorm(),
            "LlamaMLP": GatedMlp(),
            "LlamaAttention": Rotary(),
        },
    ),
    Family(
        "Mistral",
        "mistral",
        {
            "MistralForCausalLM": Head(),
            "MistralRMSNorm": RmsNorm(),
            "MistralMLP": GatedMlp(),
            "MistralAttention": Rotary(),
        },
    ),
    Family(
        "Mixtral",
        "mixtral",
        {
            "MixtralForCausalLM": Head(),
            "MixtralRMSNorm": RmsNorm(),
            "MixtralExperts": Experts(),
            "MixtralAttention": Rotary(),
        },
    ),
    Family(
        "Qwen2 and Qwen2.5",
        "qwen2",
        {
            "Qwen2ForCausalLM": Head(),
            "Qwen2RMSNorm": RmsNorm(),
            "Qwen2MLP": GatedMlp(),
            "Qwen2Attention": Rotary(),
        },
    ),
    Family(
        "Qwen2-MoE",
        "qwen2_moe",
        {
            "Qwen2MoeForCausalLM": Head(),
            "Qwen2MoeRMSNorm": RmsNorm(),
            "Qwen2MoeMLP": GatedMlp(),
            "Qwen2MoeExperts": Experts(),
            "Qwen2MoeAttention": Rotary(),
        },
    ),
    Family(
        "Qwen3",
        "qwen3",
        {
            "Qwen3ForCausalLM": Head(),
            "Qwen3RMSNorm": RmsNorm(),
            "Qwen3MLP": GatedMlp(),
            "Qwen3Attention": Rotary(),
        },
    ),
    Family(
        "Qwen3-MoE",
        "qwen3_moe",
        {
            "Qwen3MoeForCausalLM": Head(),
            "Qwen3MoeRMSNorm": RmsNorm(),
            "Qwen3MoeMLP": GatedMlp(),
            "Qwen3MoeExperts": Experts(),
            "Qwen3MoeAttention": Rotary(),
        },
    ),
    Family(
        "Gemma",
        "gemma",
        {
            "GemmaForCausalLM": Head(),
            "GemmaRMSNorm": GEMMA_NORM,
            "GemmaMLP": GatedMlp(),
            "GemmaAttention": Rotary(),
        },
    ),
    Family(
        "Gemma 2",
        "gemma2",
        {
            "Gemma2ForCausalLM": CAPPED_HEAD,
            "Gemma2RMSNorm": GEMMA_NORM,
            "Gemma2MLP": GatedMlp(),
            "Gemma2Attention": Rotary(),
        },
    ),
    Family(
        "Gemma 3",
        "gemma3",
        {
            "Gemma3ForCausalLM": CAPPED_HEAD,
            "Gemma3ForConditionalGeneration": Head(),
            "Gemma3RMSNorm": GEMMA_NORM,
            "Gemma3MLP": GatedMlp(),
            "Gemma3Attention": Rotary(),
        },
    ),
    Family("PaliGemma", "paligemma", {"PaliGemmaForConditionalGeneration": Head()}),  # its layers are Gemma's
    Family(
        "Phi-3 and Phi-4",
        "phi3",
        {
            "Phi3ForCausalLM": Head(),
            "Phi3RMSNorm": RmsNorm(),
            "Phi3Attention": Rotary(),
            "Phi3MLP": GatedMlp(projections=("gate_up_proj",), activation="activation_fn"),
        },
    ),
    Family("GPT-2", "gpt2", {"GPT2LMHeadModel": Head()}),  # its layers are the shared ones below
)

BLOCKS: dict[str, Block] = {
    f"transformers.models.{family.folder}.modeling_{family.folder}.{name}": block
    for family in FAMILIES
    for name, block in family.blocks.items()
} | {
    "torch.nn.modules.normalization.LayerNorm": LayerNorm(),
    "transformers.activations.NewGELUActivation": TanhGelu(),
}


def block_of(module: nn.Module) -> Block | None:
    """How modules of this class are accelerated; None for classes no row names."""
    for known in type(module).__mro__:
        block = BLOCKS.get(f"{known.__module__}.{known.__qualname__}")
        if block is not None:
            return block if type(module).forward is vars(known)["forward"] else None
    return None


def require_supported(model: nn.Module) -> None:
    """Refuse a model that no row names."""
    if not isinstance(block_of(model), Head):
        families = ", ".join(family.name for family in FAMILIES)
        raise UserError(
            f"{type(model).__module__}.{type(model).__name__} is not a model tightfit.hf knows; give a causal language "
            f"model of transformers itself, one of {families}, before it is compiled or wrapped for data parallelism"
        )
