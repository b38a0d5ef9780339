"""A step of one model over several ranks: rank 0 sends the step to the others, and gets the logits.

Steps go to the other ranks through connections on the loopback interface, which wait without a timeout while there are
no requests, and end with their process; layers communicate through torch.distributed. Every rank runs its layers over
its own part of the cache. The last stage's tensor ranks all-gather their parts of the logits, and the first of them
sends them to rank 0.
"""

import pickle
import secrets
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tightfit.kernels.loss.cross_entropy import softcapped
from tightfit.serve.config import EngineConfig
from tightfit.serve.forward.rope_tables import RopeTables
from tightfit.serve.forward.runner import make_cache, run_layers
from tightfit.serve.ranks.share import LOOPBACK, RankShare, agreed_budget
from tightfit.serve.schedule.step import Step

TENSORS = ("tokens", "positions", "slots", "tables", "lengths", "rows")


class RankSteps:
    """This rank's part of every step."""

    def __init__(self, share: RankShare, config: EngineConfig) -> None:
        self.share, self.budget = share, agreed_budget(share, config)
        weight = share.weight
        self.device, self.dtype = weight.device, weight.dtype
        # Layers count from the model's first, the cache from this stage's.
        self._cache_layers = {layer: layer - share.span.first for layer in range(share.span.first, share.span.last)}
        self.cache = make_cache(
            share.local_spec,
            self.budget.blocks,
            config.block_size,
            self.device,
            self.dtype,
            config.cache_format,
            self.budget.pages or None,
        )
        self.ropes = RopeTables(share.model.spec, self.budget.max_length, self.device, self.dtype)

    @torch.inference_mode()
    def run(self, step: Step) -> Tensor | None:
        """Logits [R, V] on rank 0 (where the step has rows), None elsewhere."""
        share, spread = self.share, self.share.spread
        x = run_layers(share.model.layers, self._entering(step), step, self.cache, self.ropes, self._cache_layers)
        if not share.span.is_last:
            dist.send(x.contiguous(), share.rank + spread.tensor)
            return self._received_logits(step) if share.rank == 0 else None
        logits = self._logits(x[0, step.rows])
        if spread.pipeline > 1 and share.rank == spread.ranks - spread.tensor:
            dist.send(logits.contiguous(), 0)
        return logits if share.rank == 0 else None

    def _entering(self, step: Step) -> Tensor:
        """The residual stream before this stage's layers, [1, N, H]."""
        model = self.share.model
        if self.share.span.is_first:
            return model.embed_tokens(step.tokens, step.positions)
        shape = (*step.tokens.shape, model.spec.hidden_size)
        x = torch.empty(shape, device=self.device, dtype=self.dtype)
        dist.recv(x, self.share.rank - self.share.spread.tensor)
        return x

    def _logits(self, states: Tensor) -> Tensor:
        """Logits [R, V] of states [R, H]: tensor ranks have rows of the vocabulary each."""
        model, tensor = self.share.model, self.share.spread.tensor
        own = model.head(model.norm(states))
        if tensor > 1:
            vocab_size = model.spec.vocab_size
            padded = own.new_zeros((len(own), -(-vocab_size // tensor)))
            padded[:, : own.shape[1]] = own
            parts = [torch.empty_like(padded) for _ in range(tensor)]
            dist.all_gather(parts, padded, group=self.share.mesh.get_group("tensor"))
            own = torch.cat(parts, dim=1)[:, :vocab_size]
        return softcapped(own, model.spec.logit_softcap)

    def _received_logits(self, step: Step) -> Tensor:
        spread, vocab_size = self.share.spread, self.share.model.spec.vocab_size
        logits = torch.empty((step.rows.numel(), vocab_size), device=self.device, dtype=self.dtype)
        dist.recv(logits, spread.ranks - spread.tensor)
        return logits


class RankRunner:
    """The runner of an engine on rank 0: runs its own part of a step and has the other ranks run theirs."""

    def __init__(self, steps: RankSteps) -> None:
        self.steps, self.cache, self.device = steps, steps.cache, steps.device
        self.others = _connections(steps.share.spread.ranks)
        """Each of the other ranks ends when its connection is closed, at the latest by the end of this process."""

    def set_pages(self, of_block: np.ndarray) -> None:
        """Let the steps launched from now on find, on every rank, the pages that blocks have been given."""
        self._send(of_block)
        self.cache.set_pages(of_block)

    def logits(self, step: Step) -> Tensor:
        """Logits [R, V] of the step's rows; every rank has stored its keys and values."""
        self._send(_moved(step, torch.device("cpu")))
        logits = self.steps.run(step)
        assert logits is not None
        return logits

    def _send(self, message: Step | np.ndarray) -> None:
        """A step to run, or the pages of blocks from now on, to all other ranks."""
        sent = pickle.dumps(message)
        for other in self.others:
            other.send_bytes(sent)


def follow(steps: RankSteps) -> None:
    """Repeat the steps of rank 0 until it has ended."""
    address, key = _from_first_rank(None)
    with Client(address, authkey=key) as leader, suppress(EOFError, ConnectionResetError):
        while True:
            message = pickle.loads(leader.recv_bytes())
            if isinstance(message, Step):
                steps.run(_moved(message, steps.device))
            else:
                steps.cache.set_pages(message)


def _connections(ranks: int) -> list[Connection]:
    """Connections to all other ranks, on rank 0."""
    key = secrets.token_bytes(32)
    with Listener((LOOPBACK, 0), backlog=ranks, authkey=key) as listener:
        _from_first_rank((listener.address, key))
        return [listener.accept() for _ in range(ranks - 1)]


def _from_first_rank(address: Any) -> Any:
    """Rank 0's (address, key), broadcast to all ranks; the other ranks pass None."""
    values = [address]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _moved(step: Step, device: torch.device) -> Step:
    """A copy on `device`, without the tensors derived from the step."""
    tensors = {name: getattr(step, name).to(device) for name in TENSORS}
    return replace(step, **tensors, _tiles=None)
