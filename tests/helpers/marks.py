"""Parameters of tests that are tried by `make test-slow` alone."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slowly(values: Iterable[Any], rare: Container[Any]) -> list[Any]:
    """All of the values, the rare ones marked as slow."""
    return [pytest.param(each, marks=[pytest.mark.slow] * (each in rare)) for each in values]
