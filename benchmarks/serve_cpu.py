"""The engine on a CPU beside transformers' generate and llama.cpp, in one process on the same weights: ratios only.

SmolLM2-135M's shape, random bfloat16 numbers held as float32 (as a published checkpoint is read), greedy. One stream:
the same prompt by all, alternating. Many requests: prompts and answers of mixed lengths; transformers answers them one
by one, and as one padded batch that runs until its longest answer is over. Ratios are of medians, of seconds and of
processor seconds: the latter mean something on a busy machine too. llama.cpp (one stream) has the same weights from
GGUF files of several formats; where a format rounds them, so do we, from the same file, and so does transformers, in
float32, beside our 4 bits. Rows go to benchmarks/results/serve_cpu.csv.

    python -m benchmarks.serve_cpu
    python -m benchmarks.serve_cpu --only llama.cpp --formats q4_0
    python -m benchmarks.serve_cpu --tiny
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from tightfit.serve.llama_peer import LlamaCpp
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling

Prompts = list[list[int]]
Shapes = list[tuple[int, int]]
Way = Callable[[Prompts, Shapes], list[list[int]]]
Measured = dict[str, tuple[list["Taken"], list[list[int]]]]
FORMATS = ("fp32", "fp16", "q8_0", "q4_0")
ROUNDED = ("q8_0", "q4_0")
PAD = 0
CACHE_BYTES = 2**28


def make_engine(model: Decoder, *, rounded: bool = False) -> Engine:
    """Where no prompt is found again; set up as for a file that is `rounded` or not."""
    length = min(1024, model.spec.max_positions)
    config = EngineConfig(prefix_cache=False, max_length=length, cache_bytes=CACHE_BYTES, rounded_weights=rounded)
    return Engine(model, None, config)


def run_engine(engine: Engine, prompts: list[list[int]], shapes: Shapes) -> list[list[int]]:
    """Greedy answers to all prompts at once."""
    requests = [
        Request(id=str(i), prompt=prompt, sampling=Sampling(max_tokens=answer, temperature=0))
        for i, (prompt, (_, answer)) in enumerate(zip(prompts, shapes, strict=True))
    ]
    made = engine.generate(requests)
    return [made[request.id][0].tokens for request in requests]


class Both:
    """One model twice, and prompts for it."""

    def __init__(self, preset: str) -> None:
        torch.manual_seed(0)
        spec = resolve_spec(preset)
        self.ours = Decoder(spec)
        init_weights(self.ours, gain=1.5)
        with torch.no_grad():
            for parameter in self.ours.parameters():
                parameter.copy_(parameter.bfloat16())
        no_ends = {"eos_token_id": None, "bos_token_id": None}
        config = AutoConfig.for_model(**config_from_spec(spec, dtype="float32") | no_ends)
        self.theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self.use(self.ours, make_engine(self.ours))
        self.random, self.vocab_size = random.Random(0), spec.vocab_size

    def use(self, weights: Decoder, engine: Engine) -> None:
        """Have theirs compute with `weights` and ours by `engine`."""
        self.theirs.load_state_dict(to_hf_state(weights, weights.spec), strict=False)
        self.theirs.tie_weights()
        self.engine = engine

    def prompts(self, shapes: Shapes) -> list[list[int]]:
        """Random tokens; none is padding."""
        return [[self.random.randrange(1, self.vocab_size) for _ in range(prompt)] for prompt, _ in shapes]

    def run_ours(self, prompts: list[list[int]], shapes: Shapes) -> list[list[int]]:
        """All at once."""
        return run_engine(self.engine, prompts, shapes)

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


class Taken(NamedTuple):
    """Seconds of one run: by the clock, and of all threads' processor time."""

    wall: float
    processor: float


def alternate(ways: dict[str, Way], prompts: Prompts, shapes: Shapes, rounds: int) -> Measured:
    """Run all in turn, `rounds` times; what each said, and what it took."""
    found: Measured = {name: ([], []) for name in ways}
    for way in ways.values():
        way(prompts[:1], [(shapes[0][0], 2)])  # what is made on first use is not timed
    for _ in range(rounds):
        for name, way in ways.items():
            began, began_processor = time.perf_counter(), time.process_time()
            answers = way(prompts, shapes)
            taken = Taken(time.perf_counter() - began, time.process_time() - began_processor)
            found[name][0].append(taken)
            found[name][1][:] = answers
    return found


def median(taken: list[Taken]) -> Taken:
    """Of each kind of seconds."""
    return Taken(*(statistics.median(column) for column in zip(*taken, strict=True)))


def record(case: str, weights: str, found: Measured, shapes: Shapes, arguments: argparse.Namespace) -> None:
    """A row for every peer of "ours"."""
    ours, our_answers = median(found["ours"][0]), found["ours"][1]
    tokens = sum(answer for _, answer in shapes)
    for peer, (taken, answers) in found.items():
        if peer == "ours":
            continue
        theirs = median(taken)
        agreeing = sum(a == b for a, b in zip(our_answers, answers, strict=True))
        row = {
            "case": case,
            "weights": weights,
            "peer": peer,
            "ratio": f"{theirs.wall / ours.wall:.2f}",
            "processor_ratio": f"{theirs.processor / ours.processor:.2f}",
            "processor_ms_per_token": f"{1e3 * ours.processor / tokens:.1f}",
            "requests": len(shapes),
            "agreeing": agreeing,
            "threads": torch.get_num_threads(),
            "others_running": f"{max(os.getloadavg()[0] - torch.get_num_threads(), 0):.0f}",
            "model": arguments.preset,
        }
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        append_row("serve_cpu", row, folder=arguments.results, commit=arguments.commit)


def beside_transformers(both: Both, weights: str, arguments: argparse.Namespace) -> None:
    """One stream, and sixteen requests."""
    chance, rounds = random.Random(1), arguments.rounds
    one = [(32, 32)]
    ways: dict[str, Way] = {"ours": both.run_ours, "transformers, one by one": both.run_theirs}
    record("one stream", weights, alternate(ways, both.prompts(one), one, rounds), one, arguments)
    mixed = [(chance.randint(8, 96), chance.randint(8, 64)) for _ in range(16)]
    ways["transformers, padded batch"] = both.run_theirs_padded
    found = alternate(ways, both.prompts(mixed), mixed, max(1, rounds - 2))
    record("16 requests", weights, found, mixed, arguments)


def beside_llama_cpp(path: Path, weights: str, prompts: Prompts, engine: Engine, arguments: argparse.Namespace) -> None:
    """One stream on the weights of one file."""
    shapes, peer = [(32, 32)], LlamaCpp(path)
    theirs = partial(one_after_the_other, peer)
    ways: dict[str, Way] = {"ours": partial(run_engine, engine), "llama.cpp": theirs}
    record("one stream", weights, alternate(ways, prompts, shapes, arguments.rounds), shapes, arguments)
    peer.close()


def one_after_the_other(peer: LlamaCpp, prompts: list[list[int]], shapes: Shapes) -> list[list[int]]:
    """llama.cpp's answers."""
    return [peer.tokens(prompt, answer) for prompt, (_, answer) in zip(prompts, shapes, strict=True)]


class FourBits:
    """Matrices of layers as Q4_0 and the others as Q8_0, rounded by the gguf package."""

    file_type = 2

    def kind(self, name: str, shape: tuple[int, ...]) -> str:
        """The type of our parameter `name`."""
        return "Q4_0" if name.startswith("layers.") else "Q8_0"

    def encode(self, name: str, values: Any, kind: str) -> Any:
        """The bytes of its rows."""
        import gguf

        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])


def on_files(both: Both, arguments: argparse.Namespace, folder: Path) -> None:
    """The engine on the weights of one file after the other, as it is started from each."""
    from tightfit.models.gguf.codes import load_coded
    from tightfit.models.gguf.file import GgufFile
    from tightfit.models.gguf.model import load_gguf, load_gguf_tokenizer, smollm2_path, write_gguf

    tokenizer, prompts = load_gguf_tokenizer(GgufFile(smollm2_path())), both.prompts([(32, 32)])
    for weights in arguments.formats:
        path = folder / f"{weights}.gguf"
        coder = FourBits() if weights == "q4_0" else None
        write_gguf(both.ours, tokenizer, path, "fp16" if weights == "q4_0" else weights, coder)
        file = GgufFile(path)
        plain = load_gguf(file, device="cpu", dtype=torch.float32)
        own = load_coded(file, torch.float32) if weights == "q4_0" else plain
        engine = make_engine(own, rounded=weights in ROUNDED)
        if arguments.only != "transformers":
            beside_llama_cpp(path, weights, prompts, engine, arguments)
        if weights == "q4_0" and arguments.only != "llama.cpp":
            both.use(plain, engine)
            beside_transformers(both, weights, arguments)
        path.unlink()


def main() -> None:
    """Both peers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, and no files")
    parser.add_argument("--only", choices=("transformers", "llama.cpp"))
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=FORMATS, help="of files beside llama.cpp")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of every implementation; as torch has them by default")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    arguments = parser.parse_args()
    arguments.preset = "tiny-llama" if arguments.tiny else "smollm2-135m"
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    both = Both(arguments.preset)
    if arguments.only != "llama.cpp":
        beside_transformers(both, "fp32", arguments)
    if not arguments.tiny:
        with tempfile.TemporaryDirectory() as folder:
            on_files(both, arguments, Path(folder))


if __name__ == "__main__":
    main()
