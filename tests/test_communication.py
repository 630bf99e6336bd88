"""Devices of a mesh that do not reach each other are an error, not a process that waits without an end."""

import threading
import time

import jax
import numpy as np
import pytest

from jmx.models import ModelSplit, communication
from jmx.models.communication import CommunicationError, check_communication


def split_of(*sizes: int) -> ModelSplit:
    count = int(np.prod(sizes))
    if len(jax.devices()) < count:
        pytest.skip(f"needs {count} devices")
    return ModelSplit.of(jax.sharding.Mesh(np.array(jax.devices()[:count]).reshape(sizes), ("dp", "ep")[: len(sizes)]))


@pytest.mark.parametrize("sizes", [(1,), (2,), (2, 2)])
def test_devices_that_reach_each_other(sizes: tuple[int, ...]) -> None:
    check_communication(split_of(*sizes))


def test_an_exchange_that_fails_or_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()

    def fail(*_: object) -> None:
        raise RuntimeError("unhandled cuda error")

    monkeypatch.setattr(communication, "_add", fail)
    with pytest.raises(CommunicationError, match=r"of `mesh` failed \(unhandled cuda error\); NCCL needs"):
        check_communication(split_of(2))
    monkeypatch.setattr(communication, "SECONDS", 0.2)
    monkeypatch.setattr(communication, "_add", lambda *_: held.wait())
    before = time.monotonic()
    with pytest.raises(CommunicationError, match=r"was not over within 0\.2 s"):
        check_communication(split_of(2))
    assert time.monotonic() - before < 10
    held.set()
