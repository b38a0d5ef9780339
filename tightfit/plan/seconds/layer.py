"""LayerTime: one micro-batch's seconds in one layer and in the head, on one of the tensor and context ranks."""

from tightfit.jobs.layout import Layout
from tightfit.plan.seconds.adapter import frozen_products
from tightfit.plan.seconds.attention import layer_attention
from tightfit.plan.seconds.cost_context import CostContext
from tightfit.plan.seconds.elementwise import Elementwise
from tightfit.plan.seconds.passes import PassSeconds
from tightfit.plan.seconds.products import head_filled_share, head_forward_s, layer_products

UNALIGNED = 2
"""Slowdown of products whose rows are not aligned: GPT-2's 50 257 logits (family_truth.csv, its plain loss)."""
ALIGNED_BYTES = 16


class LayerTime:
    """Seconds of one micro-batch on one rank."""

    def __init__(self, ctx: CostContext, layout: Layout) -> None:
        """One micro-batch of `layout`."""
        workload = ctx.workload
        self.tensor = tensor = layout.tensor
        self.tokens = tokens = float(layout.micro_batch * layout.local_length(workload.sequence_length))
        self.products = layer_products(ctx, tokens=tokens, tensor=tensor)
        self.products_backward_s = 2 * self.products.forward_s
        """Two products for each of forward's; one if the weights are frozen, for the gradient of its input."""
        self.is_frozen = workload.adapted is not None
        if self.is_frozen:
            self.products, self.products_backward_s = frozen_products(ctx, self.products, tokens)
        self.attention = layer_attention(ctx, tokens=tokens, tensor=tensor)
        self.elementwise = Elementwise(ctx, layout, tokens)
        self.head_forward_s = head_forward_s(ctx, tokens=tokens, tensor=tensor)
        is_fused_16_bit = workload.precision != "fp32" and workload.engine.passes.logits is None
        filled_share = head_filled_share(workload.spec, tokens=tokens, tensor=tensor)
        self.head_filled_share = filled_share if is_fused_16_bit else 1.0
        """Share of busy multiprocessors in the product of the head's input gradient (fused loss, 16 bits)."""
        self.rows_aligned = workload.spec.vocab_size // tensor * workload.weight_bytes % ALIGNED_BYTES == 0
        """Whether rows of logits begin at multiples of 16 bytes."""

    @property
    def passes(self) -> PassSeconds:
        """One layer."""
        products = PassSeconds(self.products.forward_s, self.products_backward_s)
        return products.plus(self.attention).plus(self.elementwise.passes)

    @property
    def head(self) -> PassSeconds:
        """The output projection with the fused loss; in backward products for inputs and weight, passes over logits."""
        products = 1 / self.head_filled_share + (0 if self.is_frozen else 1)
        return PassSeconds(self.head_forward_s, products * self.head_forward_s + self.elementwise.fused_loss_s)

    @property
    def plain_loss_more_s(self) -> float:
        """Further seconds of the plain loss, which holds all logits: more passes over them, and slower products if the
        rows of logits are unaligned."""
        slow_s = 0.0 if self.rows_aligned else (UNALIGNED - 1) * 3 * self.head_forward_s
        return self.elementwise.plain_loss_more_s + slow_s
