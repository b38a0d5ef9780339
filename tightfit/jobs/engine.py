"""Engine: whose code trains the job. Ours unless said otherwise; of others, what decides their memory and time.

Each is a row of facts about that code: which attention kernel it calls, how often its norms, rope and gate go over the
bytes that ours go over once, what runs beside its traffic, and what it keeps that we do not. Numbers of passes are
counted in the code or measured (Hugging Face's norm and rope on an H200: benchmarks/results/kernels.csv, 85 and 70
passes where ours take 7 and 4). How far such an estimate is from runs that others have published is on
docs/published.md.

Widths are numbers read or written per token: of the hidden size for norms and residual sums of a whole layer, of
queries and keys for rope, of the MLP's columns for its activation.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from tightfit.errors import UserError
from tightfit.jobs.layout import SPLITS
from tightfit.jobs.lever_table import ELSEWHERE, NO_HOST

AttentionKernel = Literal["cudnn", "flash2", "flash-triton", "unfused"]
EngineName = Literal[
    "tightfit",
    "hf",
    "deepspeed",
    "torchtitan",
    "torchtitan-eager",
    "megatron",
    "megatron-2022",
    "nanotron",
    "llm-foundry",
]


@dataclass(frozen=True, kw_only=True)
class Passes:
    """How often a layer's elementwise work goes over its bytes, forward and backward."""

    stream: tuple[float, float] = (9, 16)
    """Norms and residual sums, in widths of the hidden size."""
    rope: float = 2
    gate: tuple[float, float] = (3, 6)
    activation: tuple[float, float] = (2, 4)
    """The activation of an MLP without a gate."""
    logits: float | None = None
    """Over 16-bit logits beside the products; None where the `loss` lever says."""


@dataclass(frozen=True, kw_only=True)
class EngineMemory:
    """Bytes that an engine keeps and tightfit does not."""

    gradient_bytes: int = 0
    """A whole float32 buffer of gradients, per weight of a rank; 0 where gradients are as ours."""
    norm_copies: float = 0.0
    """Copies of the hidden states per layer that unfused norms and sums keep."""
    rope_copies: float = 0.0
    """Copies of queries and keys that unfused rope keeps."""
    gate_copies: float = 0.0
    """Copies of the MLP's columns that an unfused activation keeps."""
    activation_copies: float = 0.0
    """The same without a gate."""
    keeps_gathered: bool = False
    """Whether what tensor ranks gather for a block is kept, rather than gathered again."""
    slack_share: float = 0.05
    """What its allocator reserves beyond what is allocated."""
    fixed_gib: float = 0.0
    """NCCL's buffers and workspaces, where several ranks talk."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine; the defaults are ours."""

    name: EngineName
    is_for: str
    attention: AttentionKernel = "cudnn"
    passes: Passes = Passes()
    eager_norm_passes: Passes | None = None
    """For families with RMSNorm, where only LayerNorm has a fused kernel."""
    launch_share: float = 1.2
    """The host's time per layer, as a share of ours."""
    updates_unseen: bool = False
    """Whether the host launches the update before it reads the loss."""
    captures: bool = False
    """Whether steps that wait for the host are launched as CUDA graphs."""
    skips_last_product: bool = True
    """Whether a recomputed layer leaves out the product that nobody needs again."""
    kept_product_share: float = 1.0
    """The share of a layer's products that `checkpoint_keep: matmuls` keeps."""
    tensor_hidden_share: float = 0.0
    """The share of tensor ranks' traffic that runs beside the products."""
    reduces_wide: bool = True
    """Whether data ranks add up float32 gradients."""
    overlaps_gradients: bool = True
    bucket_bytes: int | None = None
    """What one collective of data ranks sends; None: a layer at a time."""
    fuses_accumulation: bool = False
    """Whether products add a micro-batch's gradients to the sum themselves."""
    overlaps_sends: bool = False
    """Whether a pipeline's sends run beside compute."""
    expert_hidden_share: float = 0.0
    """The share of sending tokens to experts and back that runs beside compute."""
    routes_split_tokens: bool = False
    """Whether a tensor rank sends experts its part of the sequence, not all tokens for its columns of each expert."""
    code_share: float = 1.0
    """Time to make fp8 codes, as a share of ours."""
    memory: EngineMemory = EngineMemory()
    fixed_layout: tuple[tuple[str, Any], ...] = ()
    """What it does not split; the search leaves these alone."""
    fixed_levers: tuple[tuple[str, Any], ...] = ()
    recomputes_all_or_nothing: bool = False
    """Whether it recomputes every layer or none."""


DATA_ONLY = tuple((name, 1) for name in SPLITS)
NATIVE = Passes(stream=(10, 18), rope=3, gate=(3, 6), activation=(2, 3), logits=21)
"""One kernel per operation, residual sums apart: torch's own LayerNorm and GELU, or what torch.compile makes."""
HF_RMS = Passes(stream=(56, 132), rope=35, gate=(5, 8), activation=(2, 3), logits=21)
"""transformers' models as they are written: norms and rope in single operations, partly in float32."""
TITAN_EAGER = Passes(stream=(14, 28), rope=14, gate=(5, 8), activation=(2, 3), logits=21)
"""nn.RMSNorm before it was one kernel, rope as complex float32 numbers, SiLU and product apart."""

ENGINES: dict[EngineName, Engine] = {
    each.name: each
    for each in (
        Engine(name="tightfit", is_for="tightfit train", launch_share=1.0, updates_unseen=True, captures=True),
        Engine(
            name="hf",
            is_for="Hugging Face's models with FSDP or accelerate",
            passes=NATIVE,
            eager_norm_passes=HF_RMS,
            skips_last_product=False,
            fixed_levers=NO_HOST,
            fixed_layout=DATA_ONLY,
            recomputes_all_or_nothing=True,
            memory=EngineMemory(norm_copies=6, rope_copies=2, gate_copies=1, slack_share=0.10),
        ),
        Engine(
            name="deepspeed",
            is_for="Hugging Face's models with DeepSpeed",
            passes=NATIVE,
            eager_norm_passes=HF_RMS,
            skips_last_product=False,
            reduces_wide=False,
            fixed_levers=ELSEWHERE,
            fixed_layout=DATA_ONLY,
            recomputes_all_or_nothing=True,
            memory=EngineMemory(norm_copies=6, rope_copies=2, gate_copies=1, slack_share=0.12),
        ),
        Engine(
            name="torchtitan",
            is_for="torchtitan with torch.compile",
            attention="flash2",
            passes=NATIVE,
            launch_share=0.48,
            skips_last_product=False,
            kept_product_share=0.5,
            fixed_levers=NO_HOST,
            memory=EngineMemory(gate_copies=1, slack_share=0.20, fixed_gib=1.5),
        ),
        Engine(
            name="torchtitan-eager",
            is_for="torchtitan without torch.compile",
            attention="flash2",
            passes=NATIVE,
            eager_norm_passes=TITAN_EAGER,
            skips_last_product=False,
            kept_product_share=0.5,
            fixed_levers=NO_HOST,
            memory=EngineMemory(norm_copies=1, rope_copies=2, gate_copies=2, slack_share=0.20, fixed_gib=1.5),
        ),
        Engine(
            name="megatron",
            is_for="Megatron-LM or NeMo with Transformer Engine",
            passes=NATIVE,
            launch_share=0.42,
            skips_last_product=False,
            tensor_hidden_share=0.6,
            fuses_accumulation=True,
            overlaps_sends=True,
            expert_hidden_share=0.25,
            routes_split_tokens=True,
            code_share=0.4,
            fixed_levers=NO_HOST,
            memory=EngineMemory(gradient_bytes=4, slack_share=0.06, fixed_gib=2.0),
        ),
        Engine(
            name="megatron-2022",
            is_for="Megatron-LM before flash attention",
            attention="unfused",
            passes=NATIVE,
            launch_share=0.6,
            skips_last_product=False,
            fixed_levers=NO_HOST,
            memory=EngineMemory(gradient_bytes=4, slack_share=0.06, fixed_gib=2.0),
        ),
        Engine(
            name="nanotron",
            is_for="nanotron",
            attention="flash2",
            passes=NATIVE,
            launch_share=0.96,
            skips_last_product=False,
            overlaps_gradients=False,
            bucket_bytes=25 * 2**20,
            fixed_levers=NO_HOST,
            memory=EngineMemory(
                gradient_bytes=4, gate_copies=2, rope_copies=1, norm_copies=1, keeps_gathered=True, slack_share=0.06
            ),
        ),
        Engine(
            name="llm-foundry",
            is_for="MosaicML's llm-foundry of 2023 (Composer with FSDP)",
            attention="flash-triton",
            passes=NATIVE,
            skips_last_product=False,
            reduces_wide=False,
            fixed_levers=NO_HOST,
            fixed_layout=DATA_ONLY,
            recomputes_all_or_nothing=True,
            memory=EngineMemory(slack_share=0.10),
        ),
    )
}
OURS = ENGINES["tightfit"]


def find_engine(name: str) -> Engine:
    """The engine called `name`, or a sentence with those there are."""
    if name not in get_args(EngineName):
        raise UserError(f"--engine is {name!r}; give one of {', '.join(ENGINES)}")
    return ENGINES[name]  # type: ignore[index]
