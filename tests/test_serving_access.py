"""Who may use a server: keys, salts of their prompts, and without keys the names of this machine."""

from typing import Any

import pytest
from starlette.requests import Request

from jmx.serving.api.errors import ApiError
from jmx.serving.api.service import Service


def service(*keys: str) -> Service:
    unused: Any = None
    return Service(unused, "model", unused, None, frozenset(), 10, 4, keys)


def asking(**headers: str) -> Request:
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "GET", "scheme": "http", "path": "/", "query_string": b"", "headers": pairs}
    return Request(scope | {"server": ("127.0.0.1", 8000)})


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "[::1]:9", "LOCALHOST:80"])
def test_names_of_this_machine_need_no_key(host: str) -> None:
    assert service().check_access(asking(Host=host)) == b""


@pytest.mark.parametrize(
    "host",
    ["attacker.example:8000", "localhost.attacker.example", "10.0.0.1", "x", "", "x:", "x:y", "é", "[::1", "::1"],
)
def test_other_names_are_refused_without_a_key(host: str) -> None:
    with pytest.raises(ApiError) as raised:
        service().check_access(asking(Host=host))
    assert raised.value.status == 403


def test_keys_have_salts_of_their_own() -> None:
    its = service("a" * 16, "b" * 16)
    salts = [its.check_access(asking(Host="any", Authorization=f"Bearer {key * 16}")) for key in "aba"]
    assert salts[0] == salts[2] != salts[1]
    assert all(salts)
    assert service("a" * 16).check_access(asking(Authorization="Bearer " + "a" * 16)) != salts[0]


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer ", "Bearer aaaa", "Basic " + "a" * 16, "a" * 16, "Bearer é"])
def test_wrong_keys_are_refused(value: str) -> None:
    with pytest.raises(ApiError) as raised:
        service("a" * 16).check_access(asking(Host="localhost", Authorization=value))
    assert raised.value.status == 401
