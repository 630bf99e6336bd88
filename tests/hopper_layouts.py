"""Layouts that "auto" is on a Hopper GPU, on any machine: the reference reads all of them.

As a plugin of pytest it does so for every layer of a run: `make test ARGS="-p tests.hopper_layouts FILE"`. Some tests
then fail for what they say, such as how many bytes a layer has.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest

HOPPER = (9, 0)


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every module of jmx, and of tests, choose as on a Hopper GPU. Those imported later do so, too."""
    import jmx.backends

    resolve = jmx.backends.resolve_layout
    for module in [*sys.modules.values()]:
        if vars(module).get("resolve_layout") is resolve:
            monkeypatch.setattr(module, "resolve_layout", _on_hopper(resolve))


def _on_hopper(resolve: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(resolve)
    def resolved(layout: str, environment: Any, *formats: Any, **named: Any) -> str:
        return resolve(layout, dataclasses.replace(environment, compute_capability=HOPPER), *formats, **named)

    return resolved


@pytest.fixture
def hopper_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's layers are in the layouts of a Hopper GPU."""
    use(monkeypatch)


def pytest_collection_finish() -> None:
    """As a plugin, once test files have imported jmx: for the whole run."""
    use(pytest.MonkeyPatch())
