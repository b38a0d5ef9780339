"""Pictures of docs/ that are drawn from measured rows.

python -m benchmarks.pictures truth --out docs/pictures/truth.png
python -m benchmarks.pictures levers --out docs/pictures/levers.png
python -m benchmarks.pictures published --out docs/pictures/published.png
python -m benchmarks.pictures tensor-meshes --out docs/pictures/tensor-meshes.png
"""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.reports.levers import draw_levers
from benchmarks.reports.published import draw_published
from benchmarks.reports.scatter import draw_truth
from benchmarks.reports.tensor_meshes import draw_tensor_meshes
from benchmarks.rows import RESULTS

app = typer.Typer(help="Draw measured rows as PNG or SVG.", no_args_is_help=True, pretty_exceptions_enable=False)
Out = Annotated[Path, typer.Option(help="Where to write it; the name ends in .png or .svg.")]


@app.command()
def truth(
    out: Out, results: Annotated[Path, typer.Option(help="Rows of memory_truth.")] = RESULTS / "memory_truth.csv"
) -> None:
    """Predicted against measured memory, with the errors."""
    for name, apart in draw_truth(results, out).items():
        typer.echo(f"{name}: {apart.rows} rows, mean error {apart.mean:.1%}, worst {apart.worst:.1%}")
    typer.echo(f"picture in {out}")


@app.command()
def levers(out: Out, results: Annotated[Path, typer.Option(help="Rows of levers.")] = RESULTS / "levers.csv") -> None:
    """What each lever saves and costs: memory on the GPU and the host beside the time of a step, as measured."""
    draw_levers(results, out)
    typer.echo(f"picture in {out}")


@app.command()
def published(out: Out) -> None:
    """Runs that others published: speed and memory, predicted for their engine."""
    draw_published(out)
    typer.echo(f"picture in {out}")


@app.command()
def tensor_meshes(out: Out) -> None:
    """Traffic and memory of tensor ranks in a line and on meshes, over their number, as the planner computes them."""
    draw_tensor_meshes(out)
    typer.echo(f"picture in {out}")


if __name__ == "__main__":
    app()
