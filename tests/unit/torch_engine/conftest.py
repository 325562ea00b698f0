from __future__ import annotations

import pytest
from engine_setup import Setup


@pytest.fixture(params=[False, True], ids=["at once", "ahead"])
def either_runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the fake runner of the test's engines runs ahead: each test that uses this runs with both."""
    monkeypatch.setattr(Setup, "runs_ahead", request.param)
    runs_ahead: bool = request.param
    return runs_ahead
