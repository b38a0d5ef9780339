"""Numbers of a running server: as JSON for the page, as text for Prometheus."""

from typing import Any

from tightfit.serve.service import Service


def stats(service: Service) -> dict[str, Any]:
    """Counters and gauges of the server, by name."""
    engine = service.engine
    counts = engine.counts
    return {
        "tokens_per_second": service.rates.per_second(),
        "cache_blocks": engine.pool.size,
        "cache_blocks_used": engine.pool.used,
        "running": len(engine.scheduler.running),
        "waiting": engine.scheduler.waiting,
        "open_requests": service.open_requests,
        "requests": counts.requests,
        "finished": counts.finished,
        "steps": counts.steps,
        "prompt_tokens": counts.prompt_tokens,
        "cached_tokens": counts.cached_tokens,
        "answer_tokens": counts.answer_tokens,
        "guessed_tokens": counts.guessed,
        "kept_tokens": counts.kept,
        "preemptions": engine.scheduler.preemptions,
    }


HELP = {
    "tokens_per_second": ("gauge", "Tokens of answers a second, over the last five seconds."),
    "cache_blocks": ("gauge", "Blocks of the key/value cache."),
    "cache_blocks_used": ("gauge", "Blocks that requests hold."),
    "running": ("gauge", "Answers under way."),
    "waiting": ("gauge", "Answers that wait for their turn."),
    "open_requests": ("gauge", "Requests whose clients wait."),
    "requests": ("counter", "Requests taken on."),
    "finished": ("counter", "Requests answered to their end."),
    "steps": ("counter", "Steps of the engine."),
    "prompt_tokens": ("counter", "Tokens of prompts."),
    "cached_tokens": ("counter", "Tokens of prompts that were found in the cache."),
    "answer_tokens": ("counter", "Tokens of answers."),
    "guessed_tokens": ("counter", "Tokens guessed by speculation."),
    "kept_tokens": ("counter", "Guessed tokens that were kept."),
    "preemptions": ("counter", "Answers put back to be computed again."),
}


def written(value: float) -> str:
    """A number in Prometheus's text, with as many digits as let counters be seen to count."""
    return f"{value:.15g}"


def prometheus(service: Service) -> str:
    """`stats` in Prometheus's text format, version 0.0.4."""
    lines = []
    for name, value in stats(service).items():
        kind, text = HELP[name]
        full = f"tightfit_{name}_total" if kind == "counter" else f"tightfit_{name}"
        lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}", f"{full} {written(value)}"]
    return "\n".join(lines) + "\n"
