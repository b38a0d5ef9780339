"""Measures how long the parts of a serving step take on this CPU (hardware/cpu_rates.py), with the engine's own code.

Measured are matrix products with more weights than the caches hold, in each format that this CPU's torch multiplies;
norms, rotary positions and activations; attention of a prompt, and of single tokens over a paged cache; and engines of
models so narrow that only their calls take time, at two depths, with one answer and with several. The best of a few
rounds counts, and the shorter of wall time and process time: time that other processes take is not the model's.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from tightfit.hardware.cpu_rates import CpuRates, Curve, ReadAs
from tightfit.kernels.attention.attention_mask import AttentionMask
from tightfit.kernels.attention.rope import rope
from tightfit.kernels.mlp.glu import glu
from tightfit.kernels.quantized.int4_linear import int4_product, int4_scales, pack_int4, takes_int4
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.layers.attending import attend_masked
from tightfit.models.presets import preset
from tightfit.models.spec import ModelSpec
from tightfit.plan.serving.cpu_operations import step_operations
from tightfit.plan.serving.step import moved_elements
from tightfit.serve.cache.paged import PagedCache
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.forward.cpu_products import fastest_products
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling
from tightfit.serve.sampling.chooser import SequenceRows, choose
from tightfit.serve.schedule.scheduler import Chunk
from tightfit.serve.schedule.sequence import Sequence
from tightfit.serve.schedule.step import make_step
from tightfit.serve.weights.half import cpu_has_products, halved
from tightfit.serve.weights.int4 import Int4Weight
from tightfit.serve.weights.norm import RowNorm
from tightfit.serve.weights.weight import PlainWeight, Weight

OUTPUTS, INPUTS, GROUP = 4096, 1024, 32
BEYOND_CACHES_BYTES = 2**27
ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
READING_ROWS = 16
"""Rows up to which reading the weights takes a good part of a product's time."""
ROUNDS = 3
PLACES = 3
"""Addresses tried for a product's input: at some, one row took twice as long as at others."""
TOKENS, LENGTH, SEQUENCES = 256, 512, 8
FEW_LAYERS, MORE_LAYERS, STEPS = 2, 10, 24
PLAIN, OWN = "tiny-llama", "tiny-gemma3"
"""Narrow models: the first runs over joint weights (forward/program.py), the second through the decoder's modules."""


@torch.inference_mode()
def measure_cpu_rates() -> CpuRates:
    """All rates of this CPU; takes some seconds."""
    spec = replace(preset("smollm2-135m"), layers=1)
    layer_us, step_us, answer_us = _calls()
    attention_gflop_s, score_ns = _attention(spec)
    return CpuRates(
        products={form: _curve(weights) for form, weights in _forms()},
        layer_us=layer_us,
        operation_us=_operation_us(),
        step_us=step_us,
        answer_us=answer_us,
        logit_ns=_logit_ns(),
        element_ns=_element_ns(spec),
        attention_gflop_s=attention_gflop_s,
        score_ns=score_ns,
        cached_gb_s=_cached_gb_s(spec),
    )


def _best_s(do: Callable[[], object]) -> float:
    do()
    return min(_seconds(do) for _ in range(ROUNDS))


def _seconds(do: Callable[[], object]) -> float:
    began, began_processor = time.perf_counter(), time.process_time()
    do()
    return min(time.perf_counter() - began, time.process_time() - began_processor)


def _forms() -> Iterator[tuple[ReadAs, list[Weight]]]:
    """Each format that this CPU multiplies, with more weights in it than its caches hold."""
    matrix = torch.randn(OUTPUTS, INPUTS) * 0.02
    yield "fp32", [PlainWeight(matrix.clone(), None) for _ in range(_copies(4.0))]
    if cpu_has_products():
        yield "fp16", [halved(PlainWeight(matrix, None)) for _ in range(_copies(2.0))]
    if takes_int4(OUTPUTS, INPUTS, 4, GROUP):
        packed = pack_int4(torch.randint(16, (OUTPUTS, INPUTS)))
        yield "int4", [_int4_weight(packed.clone()) for _ in range(_copies(0.5))]


def _copies(weight_bytes: float) -> int:
    return math.ceil(BEYOND_CACHES_BYTES / (weight_bytes * OUTPUTS * INPUTS))


def _int4_weight(packed: Tensor) -> Int4Weight:
    scale = torch.full((OUTPUTS, INPUTS // GROUP), 0.01)
    return Int4Weight(packed, int4_scales(scale, None), scale, None, 8, GROUP, int4_product(), None)


def _curve(weights: list[Weight]) -> Curve:
    """(rows, nanoseconds per element of the weights) for several numbers of rows."""
    matrix = weights[0].matrix if isinstance(weights[0], PlainWeight) else torch.zeros(OUTPUTS, INPUTS)
    with fastest_products(matrix)():
        found = [_product_ns(weights if rows <= READING_ROWS else weights[:1], rows) for rows in ROWS]
    return tuple(zip(ROWS, accumulate(found, max), strict=True))  # more rows never take less, whatever was measured


def _product_ns(weights: list[Weight], rows: int) -> float:
    inputs = torch.randn(PLACES, rows, INPUTS)
    seconds = min(_best_s(partial(_products, weights, x)) for x in inputs)
    return 1e9 * seconds / (len(weights) * OUTPUTS * INPUTS)


def _products(weights: list[Weight], x: Tensor) -> None:
    for weight in weights:
        weight.product(x)


def _element_ns(spec: ModelSpec) -> float:
    """Nanoseconds per element that a layer's norms, rotary positions and activation move."""
    x, residual = torch.randn(2, TOKENS, spec.hidden_size)
    gate, up = torch.randn(TOKENS, 2 * spec.mlp_size).chunk(2, dim=-1)
    norm = RowNorm.of(torch.ones(spec.hidden_size), 0.0, spec.norm_eps)
    query, key = (torch.randn(1, heads, TOKENS, spec.head_dim) for heads in (spec.heads, spec.kv_heads))
    turn = torch.ones(1, 1, TOKENS, spec.head_dim // 2)

    def layer() -> None:
        for _ in range(2):
            norm(x + residual)
        rope(query, key, turn, turn)
        glu(gate, up, spec.activation)

    return 1e9 * _best_s(layer) / (TOKENS * moved_elements(spec))


def _attention(spec: ModelSpec) -> tuple[float, float]:
    """GFLOP/s of the products in a prompt's attention, and ns per score for the rest of it: solved from wide heads and
    narrow ones, which differ in the products alone."""
    wide, narrow = (_score_ns(replace(spec, head_dim=size)) for size in (spec.head_dim, spec.head_dim // 4))
    flop = 4 * (spec.head_dim - spec.head_dim // 4)
    if not narrow < wide < 4 * narrow:  # disturbed by other processes: count all of it as products
        return 4 * spec.head_dim / wide, 0.0
    return flop / (wide - narrow), max(0.0, wide - 4 * spec.head_dim * (wide - narrow) / flop)


def _score_ns(spec: ModelSpec) -> float:
    """Nanoseconds of a prompt's causal attention per score (pair of a query and a key it sees)."""
    query, key, value = (
        torch.randn(1, heads, LENGTH, spec.head_dim) for heads in (spec.heads, spec.kv_heads, spec.kv_heads)
    )
    mask = AttentionMask(LENGTH, LENGTH, query.device)
    seconds = _best_s(lambda: attend_masked(query, key, value, mask, scale=1.0, window=None))
    return 1e9 * seconds / (spec.heads * LENGTH**2 / 2)


def _cached_gb_s(spec: ModelSpec) -> float:
    """GB/s at which decoding tokens of several sequences read their cached keys and values."""
    block_size, cpu = EngineConfig.block_size, torch.device("cpu")
    blocks = SEQUENCES * LENGTH // block_size
    cache = PagedCache(spec, blocks, block_size, cpu, torch.float32)
    chunks = []
    for blocks_of in torch.randperm(blocks).view(SEQUENCES, -1).tolist():
        sequence = Sequence([0] * LENGTH, Sampling(temperature=0))
        sequence.blocks = blocks_of
        chunks.append(Chunk(sequence, LENGTH - 1, 1, 0, chooses=True))
    step = make_step(chunks, block_size, cpu)
    query = torch.randn(SEQUENCES, spec.heads, spec.head_dim)
    key_value = torch.randn(SEQUENCES, 2, spec.kv_heads, spec.head_dim)
    seconds = _best_s(lambda: cache.attend_singles(step, 0, query, key_value, scale=1.0, window=None))
    return 1e-9 * cache.bytes / seconds


def _logit_ns() -> float:
    """Nanoseconds per logit of a greedy choice."""
    logits = torch.randn(SEQUENCES, preset("smollm2-135m").vocab_size)
    asked = [SequenceRows(Sequence([0], Sampling(temperature=0)), None, (), None) for _ in logits]
    return 1e9 * _best_s(lambda: choose(logits, asked)) / logits.numel()


def _calls() -> tuple[float, float, float]:
    """Microseconds of calls: of a plain layer, of the rest of a step with one answer, and of each further answer."""
    few, more = (_narrow_engine(PLAIN, layers) for layers in (FEW_LAYERS, MORE_LAYERS))
    one_us, several_us = _least_us(few, 1), _least_us(few, SEQUENCES)
    layer_us = max(0.0, _least_us(more, 1) - one_us) / (MORE_LAYERS - FEW_LAYERS)
    return layer_us, max(0.0, one_us - FEW_LAYERS * layer_us), max(0.0, several_us - one_us) / (SEQUENCES - 1)


def _operation_us() -> float:
    """Microseconds per operation of a layer that runs through its modules."""
    few, more = (_narrow_engine(OWN, layers) for layers in (FEW_LAYERS, MORE_LAYERS))
    counted = [step_operations(engine.model.spec, prompts=False) for engine in (few, more)]
    return max(0.0, _least_us(more, 1) - _least_us(few, 1)) / (counted[1] - counted[0])


def _narrow_engine(name: str, layers: int) -> Engine:
    model = Decoder(replace(preset(name), layers=layers, window=None, window_layers=()))
    init_weights(model)
    return Engine(model, None, EngineConfig(max_sequences=SEQUENCES, cache_bytes=2**20, prefix_cache=False))


def _least_us(engine: Engine, answers: int) -> float:
    return min(_step_us(engine, answers) for _ in range(ROUNDS))


def _step_us(engine: Engine, answers: int) -> float:
    """Microseconds of the median step with `answers` answers running."""
    for index in range(answers):
        sampling = Sampling(max_tokens=STEPS, temperature=0)
        engine.submit(Request(id=str(index), prompt=[1, 2, 3, 4], sampling=sampling))
    taken = []
    while engine.has_work:
        taken.append(_seconds(engine.step))
    return 1e6 * statistics.median(taken)
