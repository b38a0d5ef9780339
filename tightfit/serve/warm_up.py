"""The kernels of an engine's steps, compiled side by side before the first step is captured.

Triton compiles a kernel at its first call, and steps call them one after the other: ten seconds of a cold start. The
compiler is not written in Python and lets other threads run, so each kernel is called once in a thread of its own.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from tightfit.kernels.glu import glu
from tightfit.serve.program import Program
from tightfit.serve.step import Piece, Step

PROMPT_TOKENS = 100
"""Of a piece of a prompt beside a single token: more than one tile."""


def compile_kernels(program: Program, padding_block: int) -> None:
    """Call every kernel of a decoding step, and of a step with prompts, once; results are thrown away, and keys and
    values go to the padding block."""
    device = program.device

    def run(call: Callable[[], object]) -> None:
        with torch.cuda.device(device), torch.inference_mode():
            call()

    with ThreadPoolExecutor() as threads:
        list(threads.map(run, _calls(program, padding_block)))
    torch.cuda.synchronize(device)


def _calls(program: Program, padding_block: int) -> list[Callable[[], object]]:
    layer, spec = program.layers[0], program.spec

    def zeros(rows: int, width: int) -> Tensor:
        return torch.zeros((rows, width), device=program.device, dtype=program.dtype)

    hidden, inner = spec.hidden_size, spec.mlp_size
    qkv_size = spec.query_size + 2 * spec.kv_size
    one, many = zeros(1, hidden), zeros(8, hidden)
    gate, up = zeros(8, 2 * inner).chunk(2, dim=-1)
    calls: list[Callable[[], object]] = [
        *program.one_token_products(one, zeros(1, spec.query_size), zeros(1, inner)),
        lambda: program.norm(many, layer.mlp_norm),
        lambda: program.norm_of_sum(many, many, layer.mlp_norm),
        lambda: glu(gate, up, spec.activation),
    ]
    most = program.counters.numel() // spec.kv_heads
    for rows in (n for n in (2, 16, 32, 64, 128, 256) if n <= most):  # which cut a packed weight differently
        calls += program.coded_products(rows)
    for sequences in (n for n in (1, 2, 8, 64) if n <= most):  # which divide the keys of a sequence differently
        step = _step(program, padding_block, singles=sequences, prompt=0)
        qkv = zeros(sequences, qkv_size)
        overlap = program.overlap and sequences == 1
        calls.append(lambda qkv=qkv, step=step, overlap=overlap: program.decode(qkv, layer, step, overlap))  # type: ignore[misc]
    for prompt in (10, PROMPT_TOKENS):
        step = _step(program, padding_block, singles=1, prompt=prompt)
        qkv = zeros(1 + prompt, qkv_size)
        calls.append(lambda qkv=qkv, step=step: program.mixed(qkv, layer, step))  # type: ignore[misc]
    return calls


def _step(program: Program, padding_block: int, *, singles: int, prompt: int) -> Step:
    """A step of single tokens at position 0 and one piece of a prompt, all in the padding block."""
    device, size = program.device, program.cache.block_size
    rows = singles + prompt
    blocks = [padding_block] * -(-max(prompt, 1) // size)
    return Step(
        tokens=torch.zeros((1, rows), device=device, dtype=torch.int64),
        positions=torch.zeros((1, rows), device=device, dtype=torch.int64),
        slots=torch.full((rows,), padding_block * size, device=device, dtype=torch.int64),
        singles=singles,
        tables=torch.full((singles, 1), padding_block, device=device, dtype=torch.int32),
        lengths=torch.ones(singles, device=device, dtype=torch.int64),
        longest=1,
        pieces=[Piece(singles, prompt, 0, blocks)] if prompt else [],
        rope_lengths=[],
        rows=torch.zeros(1, device=device, dtype=torch.int64),
        block_size=size,
    )
