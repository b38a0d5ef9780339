"""LayerTime: how long one micro-batch takes in one layer and in the head, split over tensor and context ranks."""

from tightfit.jobs.layout import Layout
from tightfit.jobs.workload import Workload
from tightfit.plan.seconds.adapter import frozen_products
from tightfit.plan.seconds.attention import layer_attention
from tightfit.plan.seconds.elementwise import Elementwise
from tightfit.plan.seconds.products import head_filled_share, head_forward_s, layer_products
from tightfit.plan.seconds.rates import Rates

UNALIGNED = 2
"""Times that a product takes whose rows begin anywhere: GPT-2's 50 257 logits (family_truth.csv, its plain loss)."""
ALIGNED_BYTES = 16
MULTIPROCESSORS = 132
"""An H100 or H200 has so many; cards of other generations have 80 to 150."""


class LayerTime:
    """Seconds of one micro-batch on one rank."""

    def __init__(self, workload: Workload, rates: Rates, layout: Layout) -> None:
        """One micro-batch of `layout`."""
        spec, tensor, number_bytes = workload.spec, layout.tensor, workload.weight_bytes
        self.tokens = tokens = float(layout.micro_batch * layout.local_length(workload.sequence_length))
        self.products = layer_products(spec, rates, tokens=tokens, tensor=tensor, weight_bytes=number_bytes)
        self.frozen_backward_s: float | None = None
        """Products of a layer's backward where its weights are frozen: for inputs alone."""
        if workload.adapted is not None:
            self.products, self.frozen_backward_s = frozen_products(workload, rates, self.products, tokens)
        self.attention = layer_attention(
            spec, rates, tokens=tokens, sequence_length=workload.sequence_length, tensor=tensor
        )
        self.elementwise = Elementwise(
            spec,
            rates,
            workload.engine,
            tokens=tokens,
            tensor=tensor,
            sequence_parallel=layout.sequence_parallel,
            number_bytes=number_bytes,
        )
        self.head_forward_s = head_forward_s(spec, rates, tokens=tokens, tensor=tensor, weight_bytes=number_bytes)
        self.head_filled_share = 1.0
        """The share of the card that is busy while the head's input gradient is made: of the fused loss in 16 bits."""
        if workload.precision != "fp32" and workload.engine.passes.logits is None:
            self.head_filled_share = head_filled_share(
                spec, tokens=tokens, tensor=tensor, weight_bytes=number_bytes, multiprocessors=MULTIPROCESSORS
            )
        self.rows_aligned = spec.vocab_size // tensor * number_bytes % ALIGNED_BYTES == 0
        """Whether rows of logits begin at 16 bytes."""

    @property
    def forward_s(self) -> float:
        """Forward of one layer."""
        return self.products.forward_s + self.attention.forward_s + self.elementwise.forward_s

    @property
    def backward_s(self) -> float:
        """One layer: two products for each of forward's, or what frozen weights leave of them."""
        products_s = 2 * self.products.forward_s if self.frozen_backward_s is None else self.frozen_backward_s
        return products_s + self.attention.backward_s + self.elementwise.backward_s

    @property
    def head_backward_s(self) -> float:
        """The output projection with the fused loss, which makes the gradient of logits a chunk at a time."""
        products = 1 / self.head_filled_share + (1 if self.frozen_backward_s is None else 0)
        return products * self.head_forward_s + self.elementwise.fused_loss_s

    @property
    def plain_loss_more_s(self) -> float:
        """What a loss takes on top that holds all logits: more passes over them, and slow products for odd rows."""
        slow_s = 0.0 if self.rows_aligned else (UNALIGNED - 1) * 3 * self.head_forward_s
        return self.elementwise.plain_loss_more_s + slow_s
