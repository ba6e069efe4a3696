"""In these tests, small networks replay rounds, too; otherwise, only networks with many messages do."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def replays():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddlsim.network.engine.REPLAYED_FROM", 0)
        yield
