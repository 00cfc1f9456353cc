from typing import Any

import pytest

from helpers.published import CASES, FIRST, imported


@pytest.fixture(scope="module", params=[*CASES, *FIRST])
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def bundle(name: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The bundle imported from the checkpoint `name`; shared by tests that leave it as it is."""
    return imported(name, tmp_path_factory.mktemp(name) / "bundle")
