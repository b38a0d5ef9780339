"""How Hugging Face's tensors (`theirs`) map to the decoder's (`ours`): a list of rules per family.

`tensor_maps` expands the rules over layers and experts, to one `TensorMap` per stored tensor. Most tensors only have
another name. Some hold several of the decoder's concatenated along the output dimension (Phi-3's qkv and gate/up),
GPT-2's matrices are stored transposed, and experts, one module each on disk, are slices of one stacked parameter in the
decoder. gpt-oss stacks experts on disk too, transposed, with gate and up in turn. Nothing here imports torch.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

HEAD_MODULE = "lm_head"
"""The output projection, in files of every family."""


@dataclass(frozen=True)
class Rule:
    """Module `theirs` holds the decoder's modules `ours`, stacked along the output dimension where there are several.

    `{layer}` and `{expert}` stand for numbers; a module has a weight and possibly a bias. With `is_tensor` these are
    not modules but single tensors.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False
    is_tensor: bool = False
    stacked: bool = False
    """Whether the first dimension is that of experts; where `ours` are several, their outputs alternate."""


@dataclass(frozen=True)
class TensorMap:
    """A Hugging Face tensor and the decoder's parameters that it holds; with `expert`, that expert's slice of them."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool
    expert: int | None
    stacked: bool = False


def tensor_maps(rules: Iterable[Rule], names: Iterable[str], layers: int, experts: int) -> list[TensorMap]:
    """Maps of all the decoder's parameters `names`, layer by layer so that a file holds whole layers."""
    present, rules = set(names), list(rules)
    repeated = [i for i, rule in enumerate(rules) if "{layer}" in rule.theirs]
    before, inside, after = rules[: repeated[0]], rules[repeated[0] : repeated[-1] + 1], rules[repeated[-1] + 1 :]
    maps = [mapping for rule in before for mapping in _apply(rule, present, 0, experts)]
    maps += [mapping for i in range(layers) for rule in inside for mapping in _apply(rule, present, i, experts)]
    maps += [mapping for rule in after for mapping in _apply(rule, present, 0, experts)]
    missed = present - {name for mapping in maps for name in mapping.ours}
    assert not missed, f"no rule for {sorted(missed)[:3]}"
    return maps


def _apply(rule: Rule, present: set[str], layer: int, experts: int) -> Iterator[TensorMap]:
    """The maps of one rule in one layer: its weight and its bias, or every expert's weight."""
    theirs = rule.theirs.replace("{layer}", str(layer))
    ours = [name.replace("{layer}", str(layer)) for name in rule.ours]
    if "{expert}" in theirs:
        if ours[0] in present:
            for expert in range(experts):
                yield TensorMap(
                    f"{theirs.replace('{expert}', str(expert))}.weight", tuple(ours), rule.transposed, expert
                )
        return
    if rule.is_tensor:
        if ours[0] in present:
            yield TensorMap(theirs, tuple(ours), rule.transposed, None, rule.stacked)
        return
    for kind in ("weight", "bias"):
        whole = tuple(f"{name}.{kind}" for name in ours)
        if whole[0] in present:
            yield TensorMap(f"{theirs}.{kind}", whole, rule.transposed, None)


def llama_rules(*extra: Rule) -> tuple[Rule, ...]:
    """Llama's names outside the layers, and `extra` ones inside."""
    inside = (_in_layer(rule, "model.layers.{layer}.") for rule in (*_LLAMA_LAYER, *extra))
    return Rule("model.embed_tokens", ("embed",)), *inside, Rule("model.norm", ("norm",)), Rule(HEAD_MODULE, ("head",))


def _in_layer(rule: Rule, prefix: str) -> Rule:
    return replace(rule, theirs=prefix + rule.theirs, ours=tuple("layers.{layer}." + name for name in rule.ours))


def _expert_rules(block: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """A router, and one module per expert."""
    parts = {"gate": gate, "up": up, "down": down}
    router = Rule(f"{block}.gate", ("mlp.router",))
    return router, *(Rule(f"{block}.experts.{{expert}}.{hf}", (f"mlp.experts.{x}",)) for x, hf in parts.items())


_LLAMA_LAYER = (
    Rule("input_layernorm", ("attention_norm",)),
    Rule("self_attn.o_proj", ("attention.o",)),
    Rule("mlp.down_proj", ("mlp.down",)),
)
SPLIT = (
    *(Rule(f"self_attn.{x}_proj", (f"attention.{x}",)) for x in "qkv"),
    *(Rule(f"mlp.{x}_proj", (f"mlp.{x}",)) for x in ("gate", "up")),
)
FUSED = (
    Rule("self_attn.qkv_proj", ("attention.q", "attention.k", "attention.v")),
    Rule("mlp.gate_up_proj", ("mlp.gate", "mlp.up")),
)
MLP_NORM = (Rule("post_attention_layernorm", ("mlp_norm",)),)
SANDWICH_NORMS = (
    Rule("post_attention_layernorm", ("attention_post_norm",)),
    Rule("pre_feedforward_layernorm", ("mlp_norm",)),
    Rule("post_feedforward_layernorm", ("mlp_post_norm",)),
)
QK_NORMS = (Rule("self_attn.q_norm", ("attention.q_norm",)), Rule("self_attn.k_norm", ("attention.k_norm",)))
MIXTRAL_EXPERTS = _expert_rules("block_sparse_moe", "w1", "w3", "w2")
QWEN_EXPERTS = _expert_rules("mlp", "gate_proj", "up_proj", "down_proj")
SHARED_EXPERT = (
    *(Rule(f"mlp.shared_expert.{x}_proj", (f"mlp.shared.{x}",)) for x in ("gate", "up", "down")),
    Rule("mlp.shared_expert_gate", ("mlp.shared_gate",)),
)
SHARED_EXPERTS = (
    *(Rule(f"mlp.shared_experts.{x}_proj", (f"mlp.shared.{x}",)) for x in ("gate", "up", "down")),
    Rule("mlp.gate.e_score_correction_bias", ("mlp.correction",), is_tensor=True),
)
GPT_OSS = (
    Rule("self_attn.sinks", ("attention.sinks",), is_tensor=True),
    Rule("mlp.router", ("mlp.router",)),
    Rule(
        "mlp.experts.gate_up_proj",
        ("mlp.experts.gate", "mlp.experts.up"),
        transposed=True,
        is_tensor=True,
        stacked=True,
    ),
    Rule(
        "mlp.experts.gate_up_proj_bias",
        ("mlp.experts.gate_bias", "mlp.experts.up_bias"),
        is_tensor=True,
        stacked=True,
    ),
    Rule("mlp.experts.down_proj", ("mlp.experts.down",), transposed=True, is_tensor=True, stacked=True),
    Rule("mlp.experts.down_proj_bias", ("mlp.experts.down_bias",), is_tensor=True, stacked=True),
)
LATENT = (
    Rule("self_attn.q_proj", ("attention.q",)),
    Rule("self_attn.q_a_proj", ("attention.q_a",)),
    Rule("self_attn.q_a_layernorm", ("attention.q_a_norm",)),
    Rule("self_attn.q_b_proj", ("attention.q_b",)),
    Rule("self_attn.kv_a_proj_with_mqa", ("attention.kv_a",)),
    Rule("self_attn.kv_a_layernorm", ("attention.kv_a_norm",)),
    Rule("self_attn.kv_b_proj", ("attention.kv_b",)),
    *(Rule(f"mlp.{x}_proj", (f"mlp.{x}",)) for x in ("gate", "up")),
)
_GPT2_LAYER = (
    Rule("ln_1", ("attention_norm",)),
    Rule("attn.c_attn", ("attention.q", "attention.k", "attention.v"), transposed=True),
    Rule("attn.c_proj", ("attention.o",), transposed=True),
    Rule("ln_2", ("mlp_norm",)),
    Rule("mlp.c_fc", ("mlp.up",), transposed=True),
    Rule("mlp.c_proj", ("mlp.down",), transposed=True),
)
GPT2 = (
    Rule("transformer.wte", ("embed",)),
    Rule("transformer.wpe", ("positions",)),
    *(_in_layer(rule, "transformer.h.{layer}.") for rule in _GPT2_LAYER),
    Rule("transformer.ln_f", ("norm",)),
    Rule(HEAD_MODULE, ("head",)),
)
