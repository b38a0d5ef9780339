"""fp8: seconds that products of 8-bit codes save, less those of quantization (kernels/fp8/fp8_codes.py, fp8_mlp.py).

| codes of | numbers a token | bytes a number, scaled per tensor | per row |
|---|---|---|---|
| the inputs of projections and of the MLP, of attention's output | 2 H + Q | 6: read twice, written twice | 3 |
| the gated product, whose amax is known when it is written | F | 3, and in backward transposed 3 | 3 |
| gradients of all these products' results | 2 H + Q + 2 K | 6 | 3 |
| gradients of gate and up, whose amax is known | 2 F | 4 | 3 |
| weights, as they are and transposed | – | 6 | 8: columns are read twice |

With a scale per row, products for weights' gradients stay in bf16. One more pass adds the MLP's two input gradients.
"""

from tightfit.hardware.launches import LAYER, NOTHING, Launch
from tightfit.jobs.levers import Levers
from tightfit.models.spec import ModelSpec
from tightfit.plan.seconds.cost_context import CostContext
from tightfit.plan.seconds.layer import LayerTime
from tightfit.plan.seconds.passes import PassSeconds
from tightfit.plan.seconds.products import mlp_columns

SUM_BYTES = 6


def fp8_launch(levers: Levers) -> Launch:
    """Launches that fp8 products add to a layer."""
    return NOTHING if levers.matmul == "native" else LAYER[f"matmul={levers.matmul}"].beyond(LAYER[""])


def fp8_more_s(ctx: CostContext, layer: LayerTime, levers: Levers) -> PassSeconds:
    """Seconds that fp8 adds to one layer's forward and backward, mostly below zero; 0 on a card without fp8 units."""
    spec, peaks, efficiency = ctx.workload.spec, ctx.machine.accelerator.rates, ctx.efficiency
    if levers.matmul == "native" or not peaks.fp8 or not peaks.bf16:
        return PassSeconds()
    per_row = levers.matmul == "fp8-row"
    bf16_flops = peaks.bf16 * efficiency.narrow.products
    fp8_flops = peaks.fp8 * (efficiency.fp8_row if per_row else efficiency.fp8_tensor)
    saved_share = 1 - bf16_flops / fp8_flops
    weight_gradients_saved = 0.0 if per_row else 1 - bf16_flops / (peaks.fp8 * efficiency.fp8_tensor_wide)
    forward_bytes, backward_bytes = _coded_bytes(spec, mlp_columns(spec) / layer.tensor, layer.tokens, per_row=per_row)
    codes_bytes_s = ctx.rates.bytes_s * efficiency.codes / ctx.workload.engine.code_share
    sum_s = SUM_BYTES * layer.tokens * spec.hidden_size / ctx.rates.bytes_s
    products_s = layer.products.forward_s
    forward_s = forward_bytes / codes_bytes_s - saved_share * products_s
    backward_s = backward_bytes / codes_bytes_s + sum_s - (saved_share + weight_gradients_saved) * products_s
    return PassSeconds(forward_s, backward_s)


def _coded_bytes(spec: ModelSpec, columns: float, tokens: float, *, per_row: bool) -> tuple[float, float]:
    """Bytes read and written by quantization in forward and in backward, by the table above."""
    hidden, query, kv = spec.hidden_size, spec.query_size, spec.kv_size
    unknown, known = (3, 3) if per_row else (6, 4)
    weights = hidden * (2 * query + 2 * kv) + 3 * hidden * columns
    forward = tokens * (unknown * (2 * hidden + query) + 3 * columns) + (8 if per_row else 6) * weights
    transposed = 0 if per_row else 3
    backward = tokens * (unknown * (2 * hidden + query + 2 * kv) + (2 * known + transposed) * columns)
    return forward, backward
