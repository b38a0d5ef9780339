"""The settings of an engine."""

from dataclasses import dataclass
from typing import Literal

from tightfit.errors import UserError
from tightfit.memory.formulas.serving import BLOCK_POSITIONS, PREFILL_TOKENS, CacheFormat

Speculation = Literal["none", "lookup", "draft", "skip"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The settings of an engine; None is decided from the model, its device and free memory."""

    max_sequences: int = 64
    """Answers that run at a time, at most."""
    step_tokens: int = PREFILL_TOKENS
    """Tokens a step computes at most; longer prompts are computed in pieces (chunked prefill)."""
    max_length: int | None = None
    """Positions of prompt and answer together; the model's own at most."""
    cache_bytes: int | None = None
    memory_share: float = 0.9
    """The share of free memory that weights, activations and cache may take together."""
    block_size: int = BLOCK_POSITIONS
    cache_format: CacheFormat = "model"
    """How keys and values are stored: in the model's dtype, or in one byte per number (cache/codes.py)."""
    half_weights: bool = True
    """On a CPU: read weights from a copy in 16 bits where that changes nothing (weights/half.py)."""
    packed_products: bool = True
    """On a CPU: multiply few tokens by packed 4-bit weights without expanding them, in bfloat16 (weights/int4.py)."""
    rounded_weights: bool = False
    """The file's weights are quantized to a few bits, so a 16-bit copy may round them by another 2⁻¹¹."""
    prefix_cache: bool = True
    async_steps: bool | None = None
    """Launch a step before the host has read the tokens of the last one; None: on GPUs only."""
    graphs: bool = True
    """Capture steps that repeat as CUDA graphs."""
    overlap: bool = True
    """Let a kernel of a decoding step begin while the one before it ends, on GPUs that can."""
    speculation: Speculation = "none"
    speculated_tokens: int = 4
    skipped_layers: int = 0
    """With speculation "skip": how many of its layers the model leaves out when it serves as its own draft."""
    batch_invariant: bool = False
    """Answers are the same to the bit whatever else is in the batch (forward/row_tiles.py); slower."""
    host_bytes: int = 0
    """Host memory for keys and values of preempted answers; with 0 they are computed again."""

    @property
    def multiplies_packed(self) -> bool:
        """Whether few tokens are multiplied by packed weights in another way than many; not with `batch_invariant`."""
        return self.packed_products and not self.batch_invariant

    @property
    def rounds_weights(self) -> bool:
        """Whether a 16-bit copy of the weights may differ from them by more than float32's rounding."""
        return self.rounded_weights and self.multiplies_packed

    def __post_init__(self) -> None:
        for name in ("max_sequences", "step_tokens", "block_size", "speculated_tokens"):
            if (value := getattr(self, name)) < 1:
                raise UserError(f"{name} is {value}; give at least 1")
        if self.step_tokens < self.max_sequences:
            raise UserError(
                f"step_tokens is {self.step_tokens} and max_sequences {self.max_sequences}; "
                "a step needs a token for each sequence"
            )
        if not 0 < self.memory_share <= 1:
            raise UserError(f"memory_share is {self.memory_share}; it must be above 0 and at most 1")
        if self.batch_invariant and self.speculation != "none":
            raise UserError(
                f"speculation is {self.speculation!r} and batch_invariant is on; how far is guessed depends on the "
                "batch, and so does what is drawn: leave one of them out"
            )
        if self.host_bytes < 0:
            raise UserError(f"host_bytes is {self.host_bytes}; give 0 (compute again) or more")
        for name in ("max_length", "cache_bytes"):
            if (given := getattr(self, name)) is not None and given < 1:
                raise UserError(f"{name} is {given}; give at least 1")
