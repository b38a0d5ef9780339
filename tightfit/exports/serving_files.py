"""Files of `tightfit serve --export`: a vLLM script or a Kubernetes manifest, never over another file of the user's."""

from pathlib import Path
from typing import Literal

from tightfit.bounded_files import user_path
from tightfit.durable import write_text
from tightfit.errors import UserError
from tightfit.exports.kubernetes import kubernetes_manifest
from tightfit.exports.overwriting import refuse_overwriting
from tightfit.exports.vllm import EngineOptions, vllm_script
from tightfit.models.presets import PRESETS
from tightfit.plan.serving.deployment import Deployment

Target = Literal["vllm", "k8s"]
FILES: dict[Target, str] = {"vllm": "serve-vllm.sh", "k8s": "serve-k8s.yaml"}


def export_serving(
    target: Target, deployment: Deployment, options: EngineOptions, *, out: Path | None = None, image: str | None = None
) -> Path:
    """Write the file and return its path; a UserError if a file with other contents is there."""
    if image is not None and target != "k8s":
        raise UserError(f"--image is {image}, but only --export k8s names one; use that or leave it out")
    if target == "vllm":
        text = vllm_script(deployment, options)
    else:
        text = kubernetes_manifest(deployment, options, image=image)
    path = out or Path(FILES[target])
    _require_free(path, text)
    write_text(path, text, remedy="name another place with --out", executable=target == "vllm")
    return path


def served_weights(model: str, weights: str | None) -> str:
    """The weights that vLLM loads: `weights` where given, else the absolute path of the directory `model`."""
    if weights is not None:
        return weights
    if model in PRESETS:
        raise UserError(
            f"{model} is a shape without weights; say with --weights which directory or name on a hub vLLM shall load"
        )
    path = user_path(model, "MODEL")
    if path.is_file() or not (path / "config.json").is_file():
        raise UserError(
            f"vLLM does not load {model}; write a Hugging Face directory with `tightfit export {model} DIRECTORY` first"
        )
    return str(path.resolve())


def _require_free(path: Path, text: str) -> None:
    if not path.parent.is_dir():
        raise UserError(f"cannot write {path}: there is no directory {path.parent}; make it or give another --out")
    if path.is_dir():
        raise UserError(f"{path} is a directory; name a file with --out")
    refuse_overwriting(path, (text,), "name another place with --out")
