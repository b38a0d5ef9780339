"""Every fused operation beside its peers, forward and backward, in one run.

python -m benchmarks.kernels --results benchmarks/results      (GPU; peers that are not installed are listed as absent)
python -m benchmarks.kernels --op rms_norm --op glu
"""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.operations.run import bench_kernels
from benchmarks.reports.kernels import draw_kernels, recorded, show_kernels

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def kernels(
    op: Annotated[
        list[str] | None, typer.Option("--op", help="Only this operation, for example rms_norm. May be repeated.")
    ] = None,
    shape: Annotated[str, typer.Option(help="Only cases whose shape contains this, for example 8192×2048.")] = "",
    peer: Annotated[
        list[str] | None,
        typer.Option("--peer", help="Only this implementation, for example tightfit or Liger. May be repeated."),
    ] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu for a check on tiny shapes that needs no GPU.")] = "cuda",
    results: Annotated[
        Path | None, typer.Option(help="A directory for kernels.csv (rows are appended) and kernels.png.")
    ] = None,
    commit: Annotated[str | None, typer.Option(help="Recorded in the rows where this is not a git checkout.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time the fused operations beside eager, torch.compile, Liger, Unsloth and others, forward and backward.

    Shows the median and the 20th and 80th percentiles, the share of the limit (copy bandwidth or matrix product,
    measured in the same run), the memory a step needs, the first call with its compilation, and how far results are
    from eager's. Peers that are not installed are listed with the reason.

    \b
    python -m benchmarks.kernels
    python -m benchmarks.kernels --op rms_norm --op rope --results results
    python -m benchmarks.kernels --op linear_cross_entropy --peer tightfit --peer Liger
    """
    limits, measurements = bench_kernels(op or [], device, shape, peer or [])
    if results is not None:
        measurements = recorded(limits, measurements, results, commit)
    show_kernels(limits, measurements, as_json=as_json)
    if results is not None:
        pictures = draw_kernels(results / "kernels.csv")
        if not as_json:
            typer.echo(f"rows in {results / 'kernels.csv'}, pictures in {', '.join(map(str, pictures))}")


if __name__ == "__main__":
    app()
