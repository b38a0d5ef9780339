"""Scripts and manifests for vLLM: what they say, that Kubernetes' own schemas accept them, and what is never lost."""

import shlex
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tightfit.cli.main import app
from tightfit.errors import UserError
from tightfit.exports.kubernetes import kubernetes_manifest, object_name
from tightfit.exports.serving_files import export_serving, served_weights
from tightfit.exports.vllm import EngineOptions, vllm_arguments, vllm_script
from tightfit.hardware.machine import parse_machine
from tightfit.models.presets import preset
from tightfit.plan.serving.deployment import Deployment, make_deployment

OPTIONS = EngineOptions(weights="/models/it's mine", name="Our Model", port=9000, lookup=True)


def deployment(on: str = "8xH100-80GB", model: str = "llama-3.1-70b") -> Deployment:
    return make_deployment(model, preset(model), parse_machine(on), requests=2)


def said(arguments: list[str]) -> dict[str, str]:
    return {word: arguments[i + 1] for i, word in enumerate(arguments[:-1]) if word.startswith("--")}


def test_the_script_says_what_was_planned() -> None:
    made = deployment()
    lines = vllm_script(made, OPTIONS).splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    words = shlex.split(lines[-1])
    assert words[:4] == ["exec", "vllm", "serve", "/models/it's mine"]
    options = said(words)
    assert options["--tensor-parallel-size"] == "2"
    assert options["--data-parallel-size"] == "4"
    assert options["--max-num-seqs"] == "2"
    assert options["--max-model-len"] == str(made.length)
    assert options["--port"] == "9000"
    assert yaml.safe_load(options["--speculative-config"])["method"] == "ngram"


def test_adapters_have_the_rank_that_vllm_asks_for() -> None:
    options = EngineOptions(weights="/m", name="m", adapters={"a": "/a", "b": "/b"}, largest_rank=20)
    words = vllm_arguments(deployment(), options)
    assert words[words.index("--enable-lora") :] == [
        "--enable-lora",
        "--max-lora-rank",
        "32",
        "--lora-modules",
        "a=/a",
        "b=/b",
    ]


def test_what_spans_machines_says_how() -> None:
    text = vllm_script(deployment("4x8xA100-80GB", "llama-3.1-405b"), OPTIONS)
    assert "--distributed-executor-backend ray" in text
    assert "ray start --head" in text
    assert "--pipeline-parallel-size" in text


def objects(text: str) -> list[Any]:
    return list(yaml.safe_load_all(text))


def test_the_manifest_asks_for_the_cards_of_a_copy() -> None:
    made, service = objects(kubernetes_manifest(deployment(), OPTIONS))
    pod = made["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert made["spec"]["replicas"] == 4
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert container["args"][:2] == ["serve", "/models/it's mine"]
    assert said(container["args"])["--host"] == "0.0.0.0"
    assert "--data-parallel-size" not in container["args"]
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted == {"/dev/shm", "/models/it's mine"}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert service["spec"]["selector"].items() <= made["spec"]["template"]["metadata"]["labels"].items()
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]


def test_kubernetes_own_schemas_accept_the_manifest() -> None:
    import kubernetes_validate as validate

    for each in objects(kubernetes_manifest(deployment(), OPTIONS)):
        validate.validate(each, "1.30", strict=True)
    broken = objects(kubernetes_manifest(deployment(), OPTIONS))[0]
    broken["spec"]["replicas"] = "many"
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, "1.30", strict=True)


@pytest.mark.parametrize(
    ("name", "made"), [("org/My_Model.v2", "my-model-v2"), ("7b", "model-7b"), ("a" * 80, "a" * 63), ("x/", "x")]
)
def test_names_as_kubernetes_allows_them(name: str, made: str) -> None:
    assert object_name(name) == made


def test_what_an_export_cannot_say_is_refused() -> None:
    with pytest.raises(UserError, match=r"takes 16 cards.*--export vllm"):
        kubernetes_manifest(deployment("4x8xA100-80GB", "llama-3.1-405b"), OPTIONS)
    with pytest.raises(UserError, match="--name is '/'"):
        object_name("/")
    with pytest.raises(UserError, match="--cache-format is int8"):
        vllm_arguments(replace(deployment(), cache="int8"), OPTIONS)
    assert said(vllm_arguments(replace(deployment(), cache="fp8"), OPTIONS))["--kv-cache-dtype"] == "fp8"
    with pytest.raises(UserError, match=r"llama-3\.1-8b is a shape without weights.*--weights"):
        served_weights("llama-3.1-8b", None)


def test_a_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    made, path = deployment(), tmp_path / "serve.sh"
    assert export_serving("vllm", made, OPTIONS, out=path) == path
    assert path.stat().st_mode & stat.S_IXUSR
    export_serving("vllm", made, OPTIONS, out=path)  # the same again: nothing is lost
    path.write_text("mine")
    with pytest.raises(UserError, match=r"serve\.sh is there already.*--out"):
        export_serving("vllm", made, OPTIONS, out=path)
    assert path.read_text() == "mine"
    with pytest.raises(UserError, match="is a directory"):
        export_serving("vllm", made, OPTIONS, out=tmp_path)
    with pytest.raises(UserError, match="there is no directory"):
        export_serving("vllm", made, OPTIONS, out=tmp_path / "no" / "file")
    assert {each.name for each in tmp_path.iterdir()} == {"serve.sh"}


def test_the_command(tmp_path: Path) -> None:
    run = CliRunner().invoke
    out = tmp_path / "k8s.yaml"
    options = ["--export", "k8s", "--on", "2x8xL4", "--weights", "org/model", "--out", str(out), "--max-sequences", "4"]
    result = run(app, ["serve", "llama-3.1-8b", *options])
    assert result.exit_code == 0, result.output
    assert ": 16 copies of one card; " in result.output
    assert objects(out.read_text())[0]["spec"]["replicas"] == 16
