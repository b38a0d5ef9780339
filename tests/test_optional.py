"""What is optional and missing is skipped with a reason; what is needed and missing fails."""

import pytest

from tests.optional import OPTIONAL, missing


def failed_import(name: str) -> Exception:
    """As a test module's that imports something which does."""
    try:
        try:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        except ModuleNotFoundError as error:
            raise ValueError("the module could not be collected") from error
    except ValueError as outer:
        return outer


def test_only_optional_packages_that_are_not_there_are_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.optional.find_spec", lambda name: None)
    assert missing(failed_import("peft.tuners")) == "peft is not installed: pip install peft"
    assert missing(failed_import("tightfit.nothing")) is None
    assert missing(failed_import("torch")) is None
    assert missing(AssertionError()) is None
    monkeypatch.setattr("tests.optional.find_spec", lambda name: object())
    assert missing(failed_import("peft.tuners")) is None, "it is there, but not what is looked for"
    assert "torch" not in OPTIONAL
