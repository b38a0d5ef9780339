"""A served model over tensor ranks and stages says what it says in one process."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.covering import sampled
from tests.distributed.group import Group
from tests.train.models import TINY, TINY_ROUTED
from tightfit.compress.compression import CompressionJob, compress
from tightfit.compress.recipe import recipe_of
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.loading import load_model
from tightfit.models.presets import preset
from tightfit.models.saving import write_model
from tightfit.models.spec import ModelSpec
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.ranks.runner import RankRunner, RankSteps, follow
from tightfit.serve.ranks.share import Spread, load_share
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling

Make = Callable[[int], Group]
CONFIG = EngineConfig(max_sequences=3, step_tokens=9, block_size=4, max_length=64, cache_bytes=2**16)
SHAPES = {
    "llama": replace(TINY, layers=3, vocab_size=97),  # which no number of ranks divides
    "tied-norms": replace(TINY, family="qwen3", layers=3, tied=True, qk_norm=True),
    "routed": replace(TINY_ROUTED, layers=3, mlp_size=32),
    "sinks": replace(preset("tiny-gpt-oss"), vocab_size=97),
    "windows": replace(preset("tiny-gemma2"), vocab_size=98, window=6),
    "latent": replace(preset("tiny-deepseek-v3"), vocab_size=97),
}
CASES = [
    ("llama", Spread(tensor=2)),
    ("llama", Spread(pipeline=2)),
    ("tied-norms", Spread(tensor=4)),  # on two key heads
    ("tied-norms", Spread(tensor=2, pipeline=2)),
    ("routed", Spread(tensor=2, pipeline=2)),
    ("sinks", Spread(tensor=2)),
    ("windows", Spread(tensor=2)),
    ("windows", Spread(pipeline=3)),  # the last has no layer with a window
    ("latent", Spread(pipeline=2)),
]


def requests(vocab_size: int) -> list[Request]:
    greedy, hot = Sampling(max_tokens=8, temperature=0), Sampling(max_tokens=8, temperature=1.2, seed=5)
    return [
        Request(id=str(i), prompt=[(7 * i + 3 * j) % vocab_size for j in range(2 + 5 * i)], sampling=sampling)
        for i, sampling in enumerate((greedy, hot, greedy, replace(greedy, logprobs=2), greedy))
    ]


def answered(engine: Engine) -> list[list[int]]:
    found = engine.generate(requests(engine.model.spec.vocab_size))
    assert engine.pool.free == engine.pool.size
    return [found[key][0].tokens for key in sorted(found)]


def serve_on_rank(source: str, spread: Spread, config: EngineConfig) -> list[list[int]] | None:
    """What rank 0 answers; the others follow it."""
    share = load_share(source, spread, torch.device("cpu"), torch.float32)
    steps = RankSteps(share, config)
    if dist.get_rank() > 0:
        follow(steps)
        return None
    runner = RankRunner(steps)
    engine = Engine(share.model, None, config, ranks=runner)
    assert (engine.budget.pages > 0) == (share.model.spec.window is not None)
    made = answered(engine)
    for other in runner.others:
        other.close()  # the processes stay for the next test
    return made


def saved(spec: ModelSpec, folder: Path) -> tuple[str, Decoder]:
    torch.manual_seed(0)
    model = Decoder(spec)
    init_weights(model, gain=2.0)
    folder.mkdir()
    write_model(folder, model, None)
    return str(folder), model.eval()


@sampled(7)
@pytest.mark.parametrize(("name", "spread"), CASES, ids=lambda each: str(each))
def test_ranks_answer_as_one_process(name: str, spread: Spread, group: Make, tmp_path: Path) -> None:
    source, model = saved(SHAPES[name], tmp_path / "model")
    wanted = answered(Engine(model, None, CONFIG))
    assert len({tuple(tokens) for tokens in wanted}) > 2
    assert group(spread.ranks).run(serve_on_rank, source, spread, CONFIG)[0] == wanted


def test_ranks_expand_a_coded_projection(group: Make, tmp_path: Path) -> None:
    """Each its own rows of the vocabulary, as ranks expand the codes of layers."""
    source, _ = saved(replace(SHAPES["llama"], vocab_size=96), tmp_path / "model")
    coding = CompressionJob(model=source, out=tmp_path / "small", recipe=recipe_of("rtn", bits=8, head=8))
    compress(coding, lambda cost: None, lambda done, total, layer: None)
    small = str(tmp_path / "small")
    wanted = answered(Engine(load_model(small, packed=False).model, None, CONFIG))
    assert group(2).run(serve_on_rank, small, Spread(tensor=2), CONFIG)[0] == wanted


def test_ranks_keep_codes_and_give_way_in_small_caches(group: Make, tmp_path: Path) -> None:
    source, model = saved(SHAPES["llama"], tmp_path / "model")
    config = replace(CONFIG, cache_format="int8", max_length=32, cache_bytes=7000)
    alone = Engine(model, None, config)
    wanted = answered(alone)
    found = group(2).run(serve_on_rank, source, Spread(tensor=2), replace(config, cache_bytes=3500))[0]
    assert found == wanted
    assert alone.scheduler.preemptions > 0
