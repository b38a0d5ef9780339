"""`tightfit sample`: continue a prompt."""

from typing import Annotated

import typer

from tightfit.cli.options import Device, ModelSource, Precision, Verify


def sample(
    model: ModelSource,
    prompt: Annotated[str, typer.Option("-p", "--prompt", help="Text to continue; - reads standard input.")] = "-",
    chat: Annotated[
        bool, typer.Option(help="Wrap the prompt in the model's chat template as the user's message.")
    ] = False,
    max_tokens: Annotated[int, typer.Option("-n", "--max-tokens", help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option("-t", "--temperature", help="0 is greedy.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens that make up this probability.")] = 1.0,
    count: Annotated[int, typer.Option("-c", "--count", min=1, help="How many continuations.")] = 1,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    device: Device = "auto",
    precision: Precision = "auto",
    verify: Verify = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print prompt and continuations as one JSON object.")] = False,
) -> None:
    """Continue a prompt with a trained model.

    \b
    tightfit sample runs/stdlib -p "def main("
    tightfit sample smollm2-135m-instruct --chat -t 0 -p "What is the capital of France?"
    """
    import sys

    from tightfit.bounded_files import read_text
    from tightfit.models.loading import load_model
    from tightfit.report.tables import print_samples
    from tightfit.serve.sampling import Sampling
    from tightfit.serve.start import sample_streams
    from tightfit.train.inference_precision import inference_dtype
    from tightfit.train.precision import choose_device

    text = read_text(sys.stdin) if prompt == "-" else prompt
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    target = choose_device(device)
    loaded = load_model(model, device=target, dtype=inference_dtype(model, precision, target), verified=verify)
    print_samples(text, sample_streams(loaded, text, sampling, count=count, chat=chat), as_json=as_json)
