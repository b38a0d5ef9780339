"""What nobody should send, and what a schema allows: no answer is a 5xx, and nothing is left behind."""

from typing import Any

import pytest

from benchmarks.serve_malformed import statuses
from tests.covering import thorough
from tests.serve.running import Running

MALFORMED = 120


def test_malformed_requests_are_4xx(server: Running) -> None:
    """The first of the ten thousand that benchmarks/serve_malformed.py sends."""
    found = statuses(server.port, range(MALFORMED))
    assert sum(found.values()) == MALFORMED
    assert all(400 <= status < 500 for status in found), found
    assert len(found) >= 3


@pytest.mark.parametrize("examples", [6, thorough(24)])
def test_what_the_schema_allows_is_no_server_error(
    server: Running, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that schemathesis makes of the server's own description, good and bad.

    The same ones whichever modules are loaded: Hypothesis would read all of them, for constants to try.
    """
    import schemathesis
    from hypothesis import HealthCheck, Phase, settings
    from hypothesis.internal.conjecture import providers

    monkeypatch.setattr(providers, "is_local_module_file", lambda path: False, raising=False)
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    found: set[tuple[str, int]] = set()
    quick = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for operation in schema.get_all_operations():

        @quick
        @_given(operation.ok().as_strategy())
        def ask(case: Any) -> None:
            response = case.call(timeout=60)
            assert response.status_code < 500, (case.method, case.path, case.body, response.text)
            found.add((case.path, response.status_code))

        ask()
    assert {path for path, _ in found} >= {"/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/models"}
    assert any(status == 200 for path, status in found if path == "/v1/completions")


def _given(strategy: Any) -> Any:
    from hypothesis import given

    return given(case=strategy)
