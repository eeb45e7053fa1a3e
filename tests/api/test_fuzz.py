"""schemathesis against our own OpenAPI document: whatever it makes up, no 5xx."""

from __future__ import annotations

import schemathesis
from hypothesis import HealthCheck, given, settings

from .conftest import Instance


def test_no_request_makes_a_5xx(server: Instance) -> None:
    document = schemathesis.openapi.from_url(server.url + "/openapi.json")
    operations = [result.ok() for result in document.get_all_operations()]
    assert len(operations) >= 12
    for operation in operations:

        @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def check(case: schemathesis.Case) -> None:
            response = case.call(timeout=20)
            assert response.status_code < 500, response.text
            if response.status_code >= 400:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}

        check()
