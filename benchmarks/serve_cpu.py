"""The engine on a CPU beside transformers' generate, in one process on the same weights: ratios only.

SmolLM2-135M's shape, float32, greedy. One stream: the same prompt by both, alternating. Many requests: prompts and
answers of mixed lengths; transformers answers them one by one, and as one padded batch that runs until its longest
answer is over. Answers must agree before anything counts. Rows go to benchmarks/results/serve_cpu.csv.

    python -m benchmarks.serve_cpu
    python -m benchmarks.serve_cpu --tiny
"""

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.rows import RESULTS, append_row
from tightfit.models.decoder import Decoder
from tightfit.models.huggingface.config import config_from_spec
from tightfit.models.huggingface.weights import to_hf_state
from tightfit.models.initialisation import init_weights
from tightfit.models.resolve import resolve_spec
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.request import Request
from tightfit.serve.sampling import Sampling

Shapes = list[tuple[int, int]]
PAD = 0


class Both:
    """One model twice, and prompts for it."""

    def __init__(self, preset: str) -> None:
        torch.manual_seed(0)
        spec = resolve_spec(preset)
        self.ours = Decoder(spec)
        init_weights(self.ours, gain=1.5)
        no_ends = {"eos_token_id": None, "bos_token_id": None}
        config = AutoConfig.for_model(**config_from_spec(spec, dtype="float32") | no_ends)
        self.theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self.theirs.load_state_dict(to_hf_state(self.ours, spec), strict=False)
        self.theirs.tie_weights()
        self.engine = Engine(
            self.ours, None, EngineConfig(prefix_cache=False, max_length=min(1024, spec.max_positions))
        )
        self.random, self.vocab_size = random.Random(0), spec.vocab_size

    def prompts(self, shapes: Shapes) -> list[list[int]]:
        """Random tokens; none is padding."""
        return [[self.random.randrange(1, self.vocab_size) for _ in range(prompt)] for prompt, _ in shapes]

    def run_ours(self, prompts: list[list[int]], shapes: Shapes) -> list[list[int]]:
        """All at once."""
        requests = [
            Request(id=str(i), prompt=prompt, sampling=Sampling(max_tokens=answer, temperature=0))
            for i, (prompt, (_, answer)) in enumerate(zip(prompts, shapes, strict=True))
        ]
        made = self.engine.generate(requests)
        return [made[request.id][0].tokens for request in requests]

    def run_theirs(self, prompts: list[list[int]], shapes: Shapes) -> list[list[int]]:
        """One after the other."""
        return [self._generate([prompt], answer)[0] for prompt, (_, answer) in zip(prompts, shapes, strict=True)]

    def run_theirs_padded(self, prompts: list[list[int]], shapes: Shapes) -> list[list[int]]:
        """One batch, padded on the left, until the longest answer is over."""
        made = self._generate(prompts, max(answer for _, answer in shapes))
        return [tokens[:answer] for tokens, (_, answer) in zip(made, shapes, strict=True)]

    @torch.no_grad()
    def _generate(self, prompts: list[list[int]], answer: int) -> list[list[int]]:
        width = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        model: Any = self.theirs
        made = model.generate(ids, attention_mask=mask, max_new_tokens=answer, do_sample=False, pad_token_id=PAD)
        return [row.tolist() for row in made[:, width:]]


def seconds(run: Callable[..., Any], *arguments: Any) -> float:
    """One run."""
    began = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - began


def compare(both: Both, case: str, shapes: Shapes, rounds: int, arguments: argparse.Namespace) -> None:
    """Alternate the implementations; the best time of each counts."""
    ways: dict[str, Callable[..., Any]] = {"ours": both.run_ours, "one by one": both.run_theirs}
    if len(shapes) > 1:
        ways["padded batch"] = both.run_theirs_padded
    prompts = both.prompts(shapes)
    ours, theirs = both.run_ours(prompts, shapes), both.run_theirs(prompts, shapes)
    agreeing = sum(a == b for a, b in zip(ours, theirs, strict=True))
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            found[name].append(seconds(run, prompts, shapes))
    for name in list(ways)[1:]:
        ratio = min(found[name]) / min(found["ours"])
        print(f"{case}: {ratio:.2f}× transformers ({name}); {agreeing} of {len(shapes)} answers agree", flush=True)
        row = {
            "case": case,
            "peer": f"transformers, {name}",
            "ratio": f"{ratio:.2f}",
            "requests": len(shapes),
            "agreeing": agreeing,
            "threads": torch.get_num_threads(),
            "model": arguments.preset,
        }
        append_row("serve_cpu", row, folder=arguments.results, commit=arguments.commit)


def main() -> None:
    """Both cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    arguments = parser.parse_args()
    arguments.preset = "tiny-llama" if arguments.tiny else "smollm2-135m"
    both = Both(arguments.preset)
    chance = random.Random(1)
    compare(both, "one stream", [(32, 32)], arguments.rounds, arguments)
    mixed = [(chance.randint(8, 96), chance.randint(8, 64)) for _ in range(16)]
    compare(both, "16 requests", mixed, max(1, arguments.rounds - 2), arguments)


if __name__ == "__main__":
    main()
