"""One model over several ranks of one machine: which part of it each rank has, and how the ranks connect.

Rank = stage · tensor + tensor rank. Tensor ranks share every layer (parallel/tensor.py) and have the keys and values of
their own heads; stages have consecutive layers each, with keys and values of those. Rank 0 schedules, chooses tokens
and answers; the others repeat its steps (runner.py). All have as many blocks as the one with least memory.

Stages work one after the other: they divide memory, not time. Refused: adapters, and ranks on several machines, for
which there is `tightfit serve --export`.
"""

import os
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tightfit.errors import UserError
from tightfit.jobs.layout import Layout
from tightfit.jobs.rules.shapes import indivisible
from tightfit.models.blank import blank_decoder
from tightfit.models.decoder import Decoder
from tightfit.models.loading import load_into, source_spec
from tightfit.models.spec import ModelSpec
from tightfit.parallel.mesh import BACKENDS, make_mesh
from tightfit.parallel.pipeline_stage import StageSpan, drop_other_stages, spans_of
from tightfit.parallel.tensor import tensor_parallel
from tightfit.serve.budget import Budget, decide_budget
from tightfit.serve.config import EngineConfig

LOOPBACK = "127.0.0.1"
TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Spread:
    """How many tensor ranks and stages one copy of a model has."""

    tensor: int = 1
    pipeline: int = 1

    @property
    def ranks(self) -> int:
        """Tensor × pipeline ranks."""
        return self.tensor * self.pipeline

    @property
    def layout(self) -> Layout:
        """As a Layout, which parallel/ takes."""
        return Layout(tensor=self.tensor, pipeline=self.pipeline, sequence_parallel=False)


@dataclass(frozen=True)
class RankShare:
    """One rank's part of a model."""

    spread: Spread
    rank: int
    mesh: DeviceMesh
    model: Decoder
    span: StageSpan

    @property
    def local_spec(self) -> ModelSpec:
        """The model's shape with this rank's layers and key/value heads, as its cache has them."""
        spec, own = self.model.spec, range(self.span.first, self.span.last)
        windows = tuple(own.index(layer) for layer in spec.window_layers if layer in own)
        kv_heads = max(1, spec.kv_heads // self.spread.tensor)
        return replace(spec, layers=len(own), kv_heads=kv_heads, window_layers=windows)

    @property
    def weight(self) -> Tensor:
        """Any of its weights: all have one device and dtype."""
        return next(self.model.parameters())


def check_spread(spec: ModelSpec, spread: Spread, device: torch.device) -> None:
    """Refuse a model that cannot be divided so, and more ranks than there are GPUs."""
    if spread.tensor > 1 and (sentence := indivisible(spec, spread.tensor)):
        raise UserError(sentence.replace("layout.tensor", "--tensor"))
    if spread.pipeline > spec.layers:
        raise UserError(f"--pipeline is {spread.pipeline}, but the model has {spec.layers} layers; lower it")
    if device.type == "cuda" and spread.ranks > torch.cuda.device_count():
        raise UserError(
            f"--tensor times --pipeline is {spread.ranks}, but there are {torch.cuda.device_count()} GPUs here; lower "
            "one, or write a deployment for several machines with --export"
        )


def open_store(ranks: int) -> Any:
    """The TCPStore at which the ranks of this machine meet, held by rank 0; the others need its `port`."""
    return dist.TCPStore(LOOPBACK, 0, ranks, True, timeout=TIMEOUT, wait_for_workers=False)  # type: ignore[attr-defined]


def connect_store(port: int, ranks: int) -> Any:
    """The store that the first rank opened, for the other ranks."""
    return dist.TCPStore(LOOPBACK, port, ranks, False, timeout=TIMEOUT)  # type: ignore[attr-defined]


def join(spread: Spread, rank: int, store: Any, device: torch.device) -> torch.device:
    """Join the process group of all ranks; returns this rank's device."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    own = torch.device("cuda", rank) if device.type == "cuda" else device
    if own.type == "cuda":
        torch.cuda.set_device(own)
    dist.init_process_group(BACKENDS[own.type], store=store, rank=rank, world_size=spread.ranks, timeout=TIMEOUT)
    return own


def load_share(source: str, spread: Spread, device: torch.device, dtype: torch.dtype) -> RankShare:
    """This rank's part of the model at `source`, after `join`."""
    spec = source_spec(source)
    mesh = make_mesh(spread.layout, device.type)
    stage = mesh.get_local_rank("pipeline") if spread.pipeline > 1 else 0
    span = spans_of(spec, spread.layout, stage, length=1)[0]
    model = blank_decoder(spec, "meta", dtype)
    drop_other_stages(model, [span])
    if spread.tensor > 1:
        tensor_parallel(model, mesh, sequence_parallel=False)
    model = model.to_empty(device=device)
    if spec.tied and model.embed is not None:
        model.head.weight = model.embed.weight  # to_empty untied them
    load_into(model, source)
    return RankShare(spread, dist.get_rank(), mesh, model.eval(), span)


def agreed_budget(share: RankShare, config: EngineConfig) -> Budget:
    """This rank's budget, with as many blocks and pages as all ranks have room for."""
    # Ranks run the decoder's own layers, which have no 16-bit copy.
    return decide_budget(
        share.model,
        replace(config, half_weights=False),
        spec=share.local_spec,
        agree=lambda blocks, pages: _least(blocks, pages, device=share.weight.device),
    )


def _least(*counts: int, device: torch.device) -> tuple[int, ...]:
    """Of each count the least that any rank has."""
    least = torch.tensor(counts, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return tuple(int(count) for count in least)
