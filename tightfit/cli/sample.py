"""`tightfit sample`: continue a prompt."""

from typing import Annotated

import typer

from tightfit.cli.options import Device, ModelSource, Precision, Temperature, TopK, TopP, Verify


def sample(
    model: ModelSource,
    prompt: Annotated[
        list[str] | None,
        typer.Option("-p", "--prompt", help="Text to continue, else standard input; with --chat one for each turn."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Prompts are a user's messages; without one, asked for at the terminal.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="What the chat's system message says.")] = None,
    max_tokens: Annotated[int, typer.Option("-n", "--max-tokens", help="Most tokens to generate.")] = 128,
    temperature: Temperature = 0.8,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    count: Annotated[int, typer.Option("-c", "--count", min=1, help="How many continuations.")] = 1,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    device: Device = "auto",
    precision: Precision = "auto",
    verify: Verify = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print prompt and continuations as one JSON object.")] = False,
) -> None:
    """Continue a prompt with a trained model, or talk with it.

    \b
    tightfit sample runs/stdlib -p "def main("
    tightfit sample smollm2-135m-instruct --chat -t 0 -p "What is the capital of France?"
    tightfit sample my-model --chat --system "Answer in one word." -p "Who wrote Faust?" -p "When?"
    tightfit sample my-model --chat                          asks at the terminal; Ctrl-D ends it
    """
    import sys
    from dataclasses import replace

    from tightfit.bounded_files import read_text
    from tightfit.errors import UserError
    from tightfit.models.loading import load_model
    from tightfit.report.chat import print_chat
    from tightfit.report.tables import print_samples
    from tightfit.serve.chat import Chat
    from tightfit.serve.requests.sampling import Sampling
    from tightfit.serve.streams import sample_streams
    from tightfit.train.inference_precision import inference_dtype
    from tightfit.train.precision import choose_device

    if not chat and (system is not None or len(prompt or []) > 1):
        raise UserError("a system message and several prompts belong to a chat; add --chat")
    if chat and count > 1 and (prompt is None or len(prompt) > 1 or system is not None):
        raise UserError(f"--count is {count}, but a chat of several turns has one answer to each; leave --count out")
    asks = chat and prompt is None and sys.stdin.isatty() and not as_json
    texts = [] if asks else [read_text(sys.stdin) if text == "-" else text for text in prompt or ["-"]]
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    target = choose_device(device)
    dtype, exact = inference_dtype(model, precision, target), precision == "fp32"
    loaded = load_model(model, device=target, dtype=dtype, verified=verify, coded_gguf=not exact)
    loaded = replace(loaded, exact=exact)
    if chat and count == 1:
        return print_chat(Chat.begun(loaded, sampling, system), texts, asks=asks, as_json=as_json)
    print_samples(texts[0], sample_streams(loaded, texts[0], sampling, count=count, chat=chat), as_json=as_json)
