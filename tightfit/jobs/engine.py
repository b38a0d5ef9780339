"""Engine: the framework that trains the job, tightfit's own by default; of others, the facts for memory and time.

A row describes one framework's code: its attention kernel, memory passes of its norms, rope and gate, which
communication it overlaps with compute, and tensors that it keeps and ours does not. Numbers of passes are counted in
the code or measured (Hugging Face's norm and rope on an H200: benchmarks/results/kernels.csv, 85 and 70 passes where
ours take 7 and 4). docs/published.md compares such estimates with published runs.

One pass reads or writes one number per token and channel: of the hidden size for norms and residual sums of a whole
layer, of queries and keys for rope, of the MLP's columns for its activation.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from tightfit.errors import UserError
from tightfit.jobs.layout import SPLITS
from tightfit.jobs.lever_table import NO_HOST, VALUES_IN_OTHER_ENGINES

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
    """Memory passes of a layer's elementwise kernels, forward and backward."""

    stream: tuple[float, float] = (9, 16)
    """Norms and residual sums, over the hidden size."""
    rope: float = 2
    gate: tuple[float, float] = (3, 6)
    activation: tuple[float, float] = (2, 4)
    """The activation of an MLP without a gate."""
    logits: float | None = None
    """Passes over 16-bit logits besides the products; None: the `loss` lever decides."""


@dataclass(frozen=True, kw_only=True)
class EngineMemory:
    """Bytes that an engine keeps and tightfit does not."""

    gradient_bytes: int = 0
    """Bytes per weight of a whole float32 buffer of gradients; 0 where gradients are kept as by tightfit."""
    norm_copies: float = 0.0
    """Copies of the hidden states per layer that unfused norms and sums keep."""
    rope_copies: float = 0.0
    """Copies of queries and keys that unfused rope keeps."""
    gate_copies: float = 0.0
    """Copies of the MLP's columns that an unfused activation keeps."""
    activation_copies: float = 0.0
    """The same without a gate."""
    keeps_gathered: bool = False
    """Whether the input that tensor ranks all-gather for a block is saved, rather than gathered again in backward."""
    slack_share: float = 0.05
    """Memory that its allocator reserves but does not use, as a share of allocated memory."""
    fixed_gib: float = 0.0
    """NCCL's buffers and workspaces."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine; the defaults are ours."""

    name: EngineName
    is_for: str
    attention: AttentionKernel = "cudnn"
    passes: Passes = Passes()
    eager_norm_passes: Passes | None = None
    """Passes for families with RMSNorm, where only LayerNorm has a fused kernel; None: as `passes`."""
    launch_share: float = 1.2
    """The host's time to launch a layer, relative to ours."""
    launches_update_before_loss: bool = False
    """Whether the host launches the update before it reads the loss."""
    captures: bool = False
    """Whether steps that wait for the host are launched as CUDA graphs."""
    skips_last_product: bool = True
    """Whether recomputation leaves out a layer's last product, whose result backward does not need."""
    kept_product_share: float = 1.0
    """The share of a layer's products that `checkpoint_keep: matmuls` keeps."""
    tensor_hidden_share: float = 0.0
    """The share of tensor ranks' collectives that overlaps with products."""
    reduces_wide: bool = True
    """Whether data ranks reduce gradients in float32."""
    overlaps_gradients: bool = True
    bucket_bytes: int | None = None
    """Bytes of one collective of data ranks; None: a layer's."""
    fuses_accumulation: bool = False
    """Whether a weight gradient's product adds to the sum over micro-batches in its epilogue."""
    overlaps_sends: bool = False
    """Whether a pipeline's sends overlap with compute."""
    expert_hidden_share: float = 0.0
    """The share of all-to-alls of tokens to experts and back that overlaps with compute."""
    routes_split_tokens: bool = False
    """Whether a tensor rank sends its part of the sequence to whole experts, not all tokens to its columns of each."""
    code_share: float = 1.0
    """Time of quantization to fp8, relative to ours."""
    memory: EngineMemory = EngineMemory()
    fixed_layout: tuple[tuple[str, Any], ...] = ()
    """Fields of the layout that it cannot vary, with their values; the search does not change them."""
    fixed_levers: tuple[tuple[str, Any], ...] = ()
    recomputes_all_or_nothing: bool = False
    """Whether it recomputes every layer or none."""


DATA_ONLY = tuple((name, 1) for name in SPLITS)
NATIVE = Passes(stream=(10, 18), rope=3, gate=(3, 6), activation=(2, 3), logits=21)
"""One kernel per norm or activation, residual sums separate: torch's own LayerNorm and GELU, or torch.compile."""
HF_RMS = Passes(stream=(56, 132), rope=35, gate=(5, 8), activation=(2, 3), logits=21)
"""transformers' models in eager mode: norms and rope in single torch operations, partly in float32."""
TITAN_EAGER = Passes(stream=(14, 28), rope=14, gate=(5, 8), activation=(2, 3), logits=21)
"""nn.RMSNorm before it was one kernel, rope as complex float32 numbers, SiLU and product in separate kernels."""

ENGINES: dict[EngineName, Engine] = {
    each.name: each
    for each in (
        Engine(
            name="tightfit", is_for="tightfit train", launch_share=1.0, launches_update_before_loss=True, captures=True
        ),
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
            fixed_levers=VALUES_IN_OTHER_ENGINES,
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
    """The engine called `name`; a UserError lists the engines if there is none."""
    if name not in get_args(EngineName):
        raise UserError(f"--engine is {name!r}; give one of {', '.join(ENGINES)}")
    return ENGINES[name]  # type: ignore[index]
