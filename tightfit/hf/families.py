"""The supported families: one row each, with transformers' classes and how each is accelerated.

Classes are matched by full name, so a model's own copy of a modeling file (`trust_remote_code`) does not match.
Subclasses match too, as long as they keep the forward (FSDP2 makes some).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from tightfit.errors import UserError
from tightfit.hf.head import HeadHandler
from tightfit.hf.mlps import ClampedExpertsHandler, ExpertsHandler, GatedMlpHandler, TanhGeluHandler
from tightfit.hf.norms import LayerNormHandler, RmsNormHandler
from tightfit.hf.replacement import Handler
from tightfit.hf.rotary import RotaryHandler


@dataclass(frozen=True)
class HandledFamily:
    """A row: classes of `transformers.models.<folder>`, and for each how it is accelerated."""

    name: str
    folder: str
    handlers: Mapping[str, Handler]


CAPPED_HEAD = HeadHandler(softcap="final_logit_softcapping")
GEMMA_NORM = RmsNormHandler(eps="eps", offset=1.0)

FAMILIES = (
    HandledFamily(
        "Llama",
        "llama",
        {
            "LlamaForCausalLM": HeadHandler(),
            "LlamaRMSNorm": RmsNormHandler(),
            "LlamaMLP": GatedMlpHandler(),
            "LlamaAttention": RotaryHandler(),
        },
    ),
    HandledFamily(
        "Mistral",
        "mistral",
        {
            "MistralForCausalLM": HeadHandler(),
            "MistralRMSNorm": RmsNormHandler(),
            "MistralMLP": GatedMlpHandler(),
            "MistralAttention": RotaryHandler(),
        },
    ),
    HandledFamily(
        "Mixtral",
        "mixtral",
        {
            "MixtralForCausalLM": HeadHandler(),
            "MixtralRMSNorm": RmsNormHandler(),
            "MixtralExperts": ExpertsHandler(),
            "MixtralAttention": RotaryHandler(),
        },
    ),
    HandledFamily(
        "Qwen2 and Qwen2.5",
        "qwen2",
        {
            "Qwen2ForCausalLM": HeadHandler(),
            "Qwen2RMSNorm": RmsNormHandler(),
            "Qwen2MLP": GatedMlpHandler(),
            "Qwen2Attention": RotaryHandler(),
        },
    ),
    HandledFamily(
        "Qwen2-MoE",
        "qwen2_moe",
        {
            "Qwen2MoeForCausalLM": HeadHandler(),
            "Qwen2MoeRMSNorm": RmsNormHandler(),
            "Qwen2MoeMLP": GatedMlpHandler(),
            "Qwen2MoeExperts": ExpertsHandler(),
            "Qwen2MoeAttention": RotaryHandler(),
        },
    ),
    HandledFamily(
        "Qwen3",
        "qwen3",
        {
            "Qwen3ForCausalLM": HeadHandler(),
            "Qwen3RMSNorm": RmsNormHandler(),
            "Qwen3MLP": GatedMlpHandler(),
            "Qwen3Attention": RotaryHandler(),
        },
    ),
    HandledFamily(
        "Qwen3-MoE",
        "qwen3_moe",
        {
            "Qwen3MoeForCausalLM": HeadHandler(),
            "Qwen3MoeRMSNorm": RmsNormHandler(),
            "Qwen3MoeMLP": GatedMlpHandler(),
            "Qwen3MoeExperts": ExpertsHandler(),
            "Qwen3MoeAttention": RotaryHandler(),
        },
    ),
    HandledFamily(
        "OLMoE",
        "olmoe",
        {
            "OlmoeForCausalLM": HeadHandler(),
            "OlmoeRMSNorm": RmsNormHandler(),
            "OlmoeExperts": ExpertsHandler(),
            "OlmoeAttention": RotaryHandler(),
        },
    ),
    HandledFamily(  # its rotary tables have half the width: those stay transformers' own
        "gpt-oss",
        "gpt_oss",
        {
            "GptOssForCausalLM": HeadHandler(),
            "GptOssRMSNorm": RmsNormHandler(),
            "GptOssExperts": ClampedExpertsHandler(),
        },
    ),
    HandledFamily(
        "DeepSeek-V2",
        "deepseek_v2",
        {
            "DeepseekV2ForCausalLM": HeadHandler(),
            "DeepseekV2RMSNorm": RmsNormHandler(),
            "DeepseekV2MLP": GatedMlpHandler(),
            "DeepseekV2Experts": ExpertsHandler(),
        },
    ),
    HandledFamily(
        "DeepSeek-V3",
        "deepseek_v3",
        {
            "DeepseekV3ForCausalLM": HeadHandler(),
            "DeepseekV3RMSNorm": RmsNormHandler(),
            "DeepseekV3MLP": GatedMlpHandler(),
            "DeepseekV3Experts": ExpertsHandler(),
        },
    ),
    HandledFamily(
        "Gemma",
        "gemma",
        {
            "GemmaForCausalLM": HeadHandler(),
            "GemmaRMSNorm": GEMMA_NORM,
            "GemmaMLP": GatedMlpHandler(),
            "GemmaAttention": RotaryHandler(),
        },
    ),
    HandledFamily(
        "Gemma 2",
        "gemma2",
        {
            "Gemma2ForCausalLM": CAPPED_HEAD,
            "Gemma2RMSNorm": GEMMA_NORM,
            "Gemma2MLP": GatedMlpHandler(),
            "Gemma2Attention": RotaryHandler(),
        },
    ),
    HandledFamily(
        "Gemma 3",
        "gemma3",
        {
            "Gemma3ForCausalLM": CAPPED_HEAD,
            "Gemma3ForConditionalGeneration": HeadHandler(),
            "Gemma3RMSNorm": GEMMA_NORM,
            "Gemma3MLP": GatedMlpHandler(),
            "Gemma3Attention": RotaryHandler(),
        },
    ),
    HandledFamily(
        "PaliGemma", "paligemma", {"PaliGemmaForConditionalGeneration": HeadHandler()}
    ),  # its layers are Gemma's
    HandledFamily(
        "Phi-3 and Phi-4",
        "phi3",
        {
            "Phi3ForCausalLM": HeadHandler(),
            "Phi3RMSNorm": RmsNormHandler(),
            "Phi3Attention": RotaryHandler(),
            "Phi3MLP": GatedMlpHandler(projections=("gate_up_proj",), activation="activation_fn"),
        },
    ),
    HandledFamily("GPT-2", "gpt2", {"GPT2LMHeadModel": HeadHandler()}),  # its layers' classes are shared: HANDLERS
)

HANDLERS: dict[str, Handler] = {
    f"transformers.models.{family.folder}.modeling_{family.folder}.{name}": handler
    for family in FAMILIES
    for name, handler in family.handlers.items()
} | {
    "torch.nn.modules.normalization.LayerNorm": LayerNormHandler(),
    "transformers.activations.NewGELUActivation": TanhGeluHandler(),
}


def handler_of(module: nn.Module) -> Handler | None:
    """The handler for modules of this class; None for a class that no row names, or with a forward of its own."""
    for known in type(module).__mro__:
        handler = HANDLERS.get(f"{known.__module__}.{known.__qualname__}")
        if handler is not None:
            return handler if type(module).forward is vars(known)["forward"] else None
    return None


def require_supported(model: nn.Module) -> None:
    """Refuse a model that no row names."""
    if not isinstance(handler_of(model), HeadHandler):
        families = ", ".join(family.name for family in FAMILIES)
        raise UserError(
            f"{type(model).__module__}.{type(model).__name__} is not a model tightfit.hf knows; give a causal language "
            f"model of transformers itself, one of {families}, before it is compiled or wrapped for data parallelism"
        )
