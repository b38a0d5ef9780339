"""The engine: requests in, tokens out, one step at a time. Not for several threads; service.py gives it one.

A step is scheduled and run, and tokens are chosen from its logits; each answer is then extended by its tokens, and
finished answers free their blocks. Where the model runs on a GPU and no answer needs the host (`Sampling.needs_host`,
guesses), a step is launched before the tokens of the one before it are read (`graphs/async_steps.py`): scheduling needs
lengths only.
"""

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import torch

from tightfit.errors import UserError
from tightfit.models.decoder import Decoder
from tightfit.models.huggingface.adapter import Adapter
from tightfit.models.text.tokenizer import Tokenizer
from tightfit.serve.assembly import (
    capture_steps,
    make_budget,
    make_host,
    make_proposer,
    make_runner,
    make_steps,
    make_windows,
    prepare_codes,
    refuse_batch_invariant,
)
from tightfit.serve.budget import Budget
from tightfit.serve.config import EngineConfig
from tightfit.serve.forward.adapters import refuse_folded
from tightfit.serve.forward.rope_tables import length_of_change
from tightfit.serve.forward.runner import Runner
from tightfit.serve.graphs.async_steps import AsyncSteps, Flight
from tightfit.serve.graphs.compiler import Compiler
from tightfit.serve.held_bytes import held_bytes
from tightfit.serve.ranks.runner import RankRunner
from tightfit.serve.requests.grammar import Constraints, Matcher
from tightfit.serve.requests.request import MOST_ANSWERS, Answer, Finish, Output, Request, TokenLogprob
from tightfit.serve.requests.text_stream import TextStream
from tightfit.serve.running import Running
from tightfit.serve.sampling.chooser import Chosen, SequenceRows, choose, choose_alone
from tightfit.serve.schedule.block_pool import BlockPool
from tightfit.serve.schedule.scheduler import Chunk, Limits, Scheduler
from tightfit.serve.schedule.sequence import Sequence
from tightfit.serve.schedule.step import make_step, ordered
from tightfit.serve.speculation.break_even import break_even_share, hint


@dataclass
class Counts:
    """Totals since the engine began; `guessed` tokens are those of speculation, `kept` the accepted ones among them."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    requests: int = 0
    finished: int = 0
    guessed: int = 0
    kept: int = 0


class Engine:
    """A model, its paged cache and its scheduler."""

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer | None,
        config: EngineConfig | None = None,
        *,
        draft: Decoder | None = None,
        adapters: Mapping[str, Adapter] | None = None,
        ranks: RankRunner | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        """`compiler` compiles kernels in other processes; without one this process compiles them."""
        self.model, self.tokenizer, self.config = model.eval(), tokenizer, config or EngineConfig()
        self.adapters, self.spread = dict(adapters or {}), ranks is not None
        refuse_folded(self.adapters, model.spec)
        if self.config.batch_invariant:
            refuse_batch_invariant(ranks=self.spread, adapters=bool(self.adapters))
        if ranks is None:
            for each in (model,) if draft is None else (model, draft):
                self.config = prepare_codes(each, self.config)
        self.budget: Budget = (
            ranks.steps.budget if ranks is not None else make_budget(model, self.config, draft, self.adapters)
        )
        self.max_length = self.budget.max_length
        self.pool = BlockPool(self.budget.blocks, self.config.block_size)
        self._windows = make_windows(model.spec, self.config, self.budget)
        self.runner: Runner | RankRunner = (
            ranks if ranks is not None else make_runner(model, self.config, self.budget, self.adapters)
        )
        self.counts = Counts()
        self._proposer = make_proposer(self.runner, model, draft, self.budget, self.config)
        self._steps = make_steps(self.runner, self.config)
        capture_steps(self._steps, self._proposer, self.config, compiler)
        self.break_even = self._measure_break_even()
        self.host = make_host(self.runner, model.spec, self.config, self._windows)
        self.scheduler = Scheduler(self.pool, self._limits(), self.host, self._windows)
        self._running: dict[Sequence, Running] = {}
        self._of_request: dict[str, list[Running]] = {}
        self._arrivals = 0
        self._constraints: Constraints | None = None
        self._constraints_lock = threading.Lock()  # grammars are checked in threads of their own (service.py)
        self._host_bound = 0  # running answers whose `sampling.needs_host`
        self._flights: deque[Flight] = deque()
        self._async_steps = AsyncSteps(self._steps) if self._steps is not None and self._proposer is None else None

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work or bool(self._flights)

    @property
    def allocated_bytes(self) -> int:
        """Bytes that weights, cache and buffers really take: by the GPU's allocator; on a CPU, of all tensors."""
        if self.runner.device.type == "cuda":
            return torch.cuda.memory_allocated(self.runner.device)
        return held_bytes(self.model, self.runner, self._proposer)

    def describe(self) -> str:
        """Lines for the user: the budget, predicted and allocated bytes, and the break-even share of kept guesses."""
        predicted, allocated = (f"{b / 2**20:,.0f} MiB" for b in (self.budget.standing_bytes, self.allocated_bytes))
        budget = self.budget.describe(self.config.block_size)
        lines = f"{budget}\npredicted {predicted} for weights and cache, allocated {allocated}"
        if self.break_even is None:
            return lines
        pays = f"pays from {self.break_even:.0%} kept on" if self.break_even <= 1 else "cannot pay here"
        return f"{lines}\nguessing {self.config.speculated_tokens} tokens at a time {pays}, for one answer at a time"

    @property
    def guessing_hint(self) -> str | None:
        """A sentence where guesses cost more time than they save; else None."""
        return hint(self.counts.kept, self.counts.guessed, self.break_even)

    def check(self, request: Request) -> Request:
        """The request itself; a UserError where the engine cannot answer it."""
        prompt, spec = request.prompt, self.model.spec
        if not prompt:
            raise UserError("the prompt is empty; begin with the model's first or end-of-text token")
        if bad := [token for token in prompt if not 0 <= token < spec.vocab_size]:
            raise UserError(f"the prompt has token {bad[0]}, but the model's vocabulary ends at {spec.vocab_size - 1}")
        if len(prompt) >= self.max_length:
            raise UserError(f"the prompt is {len(prompt)} tokens long; there is room for {self.max_length}, shorten it")
        if not 1 <= request.count <= MOST_ANSWERS:
            raise UserError(f"count is {request.count}; it must lie between 1 and {MOST_ANSWERS}")
        if request.adapter is not None and request.adapter not in self.adapters:
            known = ", ".join(self.adapters) or "none"
            raise UserError(f"there is no adapter {request.adapter!r}; there are {known}")
        if bad := [token for token in request.sampling.logit_bias if token >= spec.vocab_size]:
            raise UserError(f"logit_bias has token {bad[0]}, but the model's vocabulary is of {spec.vocab_size} tokens")
        if request.sampling.grammar is not None:
            self._matcher(request)
        return request

    def submit(self, request: Request) -> None:
        """Take on a request; its outputs come from `step`."""
        request = self.check(request)
        if request.id in self._of_request:
            raise UserError(f"there is a request {request.id!r} already")
        self._arrivals += 1
        self.counts.requests += 1
        self.counts.prompt_tokens += len(request.prompt)
        answers = [self._begin(request, index) for index in range(request.count)]
        self._of_request[request.id] = answers
        first, others = answers[0], answers[1:]
        if self.scheduler.limits.prefix_cache:
            first.siblings, others = others, []
        for running in (first, *others):
            self.scheduler.add(running.sequence)

    def cancel(self, request_id: str) -> None:
        """Drop a request and free its blocks at once; ids that are unknown or finished are ignored."""
        for running in self._of_request.pop(request_id, []):
            self.scheduler.remove(running.sequence, "cancelled")
            if self._running.pop(running.sequence, None) is not None:
                self._host_bound -= running.sequence.sampling.needs_host

    def step(self) -> list[Output]:
        """Run a step and return its outputs; or launch it, and return those of the one before."""
        if self._async_steps is not None and not self._host_bound:
            return self._launch(self._async_steps)
        outputs = self._collect(0)
        chunks = self._schedule()
        return outputs + (self._run(chunks) if chunks else [])

    def _schedule(self) -> list[Chunk]:
        """The chunks of the next step, whose layers with a window find their pages."""
        chunks = self.scheduler.schedule()
        if self._windows is not None and self._windows.has_changed:
            self.runner.set_pages(self._windows.of_block)
            self._windows.has_changed = False
        return chunks

    def _launch(self, async_steps: AsyncSteps) -> list[Output]:
        """Launch the next step, then read the tokens of the one before."""
        chunks = ordered(self._schedule())
        if chunks:
            self.counts.steps += 1
            self._flights.append(async_steps.launch(chunks))
            self.scheduler.mark_launched(chunks)
            for chunk in chunks:
                if not chunk.chooses:
                    self.scheduler.cache_full_blocks(chunk.sequence)
        return self._collect(1 if chunks else 0)

    def _collect(self, flying: int) -> list[Output]:
        """Outputs of the launched steps, except for the last `flying`, which stay in flight."""
        outputs = []
        while len(self._flights) > flying:
            flight = self._flights.popleft()
            for chunk, token in zip(flight.chunks, flight.read(), strict=True):
                chunk.sequence.pending -= 1
                running = self._running.get(chunk.sequence)
                if running is not None:
                    outputs.append(self._extend(running, [token]))
        return outputs

    def _run(self, chunks: list[Chunk]) -> list[Output]:
        """Run one step and choose its tokens before returning."""
        drafts = self._proposer.propose(chunks) if self._proposer else {}
        chunks = ordered(chunks)
        logits = self._logits(chunks)
        self.counts.steps += 1
        choosing = [chunk for chunk in chunks if chunk.chooses]
        asked = [self._rows_of(chunk, drafts.get(chunk.sequence)) for chunk in choosing]
        for chunk in chunks:
            chunk.sequence.stored = chunk.end
        chosen = (choose_alone if self.config.batch_invariant else choose)(logits, asked) if asked else []
        for chunk in chunks:
            if not chunk.chooses:
                self.scheduler.cache_full_blocks(chunk.sequence)
        return [self._keep(chunk, choice) for chunk, choice in zip(choosing, chosen, strict=True)]

    def _logits(self, chunks: list[Chunk]) -> torch.Tensor:
        """Logits of a step of `chunks`, which are `ordered`, where a token is chosen or a guess is checked."""
        if self._steps is not None:
            return self._steps.logits(chunks)
        return self.runner.logits(make_step(chunks, self.config.block_size, self.runner.device))

    def generate(self, requests: Iterable[Request]) -> dict[str, list[Answer]]:
        """All answers to `requests`, by their ids."""
        answers: dict[str, list[Answer]] = {}
        for request in requests:
            self.submit(request)
            answers[request.id] = [Answer() for _ in range(request.count)]
        while self.has_work:
            for output in self.step():
                answers[output.request][output.index].add(output)
        return answers

    def _limits(self) -> Limits:
        config, change = self.config, length_of_change(self.model.spec)
        return Limits(
            sequences=config.max_sequences,
            step_tokens=config.step_tokens,
            prefix_cache=config.prefix_cache and change is None,
            rewind_at=change,
            lookahead=config.speculated_tokens if self._proposer else 0,
        )

    def _measure_break_even(self) -> float | None:
        """The share of guesses that must be kept for guessing to pay; None without guesses and over ranks."""
        if self._proposer is None or self.spread:
            return None
        guesses = self.config.speculated_tokens
        return break_even_share(self._logits, self._proposer, self.pool, guesses, longest=self.max_length)

    def _begin(self, request: Request, index: int) -> Running:
        sampling = request.sampling
        room = self.max_length - len(request.prompt)
        if sampling.max_tokens > room:
            sampling = replace(sampling, max_tokens=room)
        sequence = Sequence(
            request.prompt,
            sampling,
            index,
            priority=request.priority,
            arrival=self._arrivals,
            adapter=request.adapter,
        )
        text = TextStream(self.tokenizer, sampling.stop) if self.tokenizer is not None else None
        running = Running(request, sequence, text, self._matcher(request))
        self._running[sequence] = running
        self._host_bound += sampling.needs_host
        return running

    def _matcher(self, request: Request) -> Matcher | None:
        grammar = request.sampling.grammar
        if grammar is None:
            return None
        if self.tokenizer is None:
            raise UserError("the model has no tokenizer, so its answers cannot follow a grammar")
        with self._constraints_lock:
            if self._constraints is None:
                self._constraints = Constraints(self.tokenizer, self.model.spec.vocab_size)
        return self._constraints.matcher(grammar)

    def _rows_of(self, chunk: Chunk, draft: torch.Tensor | None) -> SequenceRows:
        running = self._running[chunk.sequence]
        return SequenceRows(chunk.sequence, running.matcher, tuple(chunk.proposal), draft)

    def _keep(self, chunk: Chunk, chosen: Chosen) -> Output:
        """Extend an answer by the guesses that were kept and the token after them."""
        sequence = chunk.sequence
        if chunk.proposal:
            kept = len(chosen.tokens) - 1
            self.counts.guessed += len(chunk.proposal)
            self.counts.kept += kept
            sequence.stored = chunk.end + kept
            sequence.draft_stored = min(sequence.draft_stored, sequence.stored)
        return self._extend(self._running[sequence], chosen.tokens, chosen.logprobs)

    def _extend(self, running: Running, tokens: list[int], logprobs: Items[TokenLogprob] = ()) -> Output:
        """Extend an answer by `tokens`, and finish it if one of them ends it: done for hundreds of answers a step."""
        sequence = running.sequence
        cached = sequence.cached if sequence.answered == 0 else 0
        taken, text, finish = running.extend(tokens)
        self.counts.answer_tokens += len(taken)
        self.counts.cached_tokens += cached
        self.scheduler.cache_full_blocks(sequence)
        if finish is not None:
            self._finish(running, finish)
        for sibling in running.siblings:
            self.scheduler.add(sibling.sequence)
        running.siblings = []
        logprobs = tuple(logprobs[: len(taken)])
        return Output(running.request.id, sequence.index, tuple(taken), text, logprobs, finish, cached)

    def _finish(self, running: Running, finish: Finish) -> None:
        self.scheduler.remove(running.sequence, finish)
        del self._running[running.sequence]
        self._host_bound -= running.sequence.sampling.needs_host
        unfinished = self._of_request[running.request.id]
        unfinished.remove(running)
        if not unfinished:
            del self._of_request[running.request.id]
            self.counts.finished += 1
