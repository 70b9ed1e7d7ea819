"""What is said where a Ray cannot be joined."""

from __future__ import annotations

import socket
import time

import pytest

from agentrl.errors import AgentRLError, ConfigError
from agentrl.ports import free_port
from agentrl.system.ray_address import refusal, require_listener


def test_an_address_where_nothing_listens_is_told_at_once():
    started, address = time.monotonic(), f"127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError, match=rf"no Ray at {address} .*: start one with `ray start --head`, or leave run.ray_address out"):
        require_listener(address)
    assert time.monotonic() - started < 1.0


def test_an_address_where_something_listens_and_one_that_ray_looks_up_are_left_to_ray():
    with socket.create_server(("127.0.0.1", 0)) as server:
        require_listener(f"127.0.0.1:{server.getsockname()[1]}")
    require_listener("auto")
    with pytest.raises(ConfigError, match=r"no Ray at 127\.0\.0\.1:99999"):
        require_listener("127.0.0.1:99999")


class AuthenticationError(Exception):
    """Of the name that Ray's has."""


@pytest.mark.parametrize(
    ("error", "address", "told"),
    [
        (ConnectionError("Could not find any running Ray instance"), "auto", r"no Ray at auto \(Could not find .*ray start --head.*then$"),
        (ConnectionError("Failed to connect"), "h:6379", r"no Ray at h:6379 \(Failed to connect\).*RAY_AUTH_MODE=token"),
        (AuthenticationError("no token was found\nmore"), "h:6379", r"Ray refuses the token at h:6379: no token was found\. .*RAY_AUTH_MODE=token"),
        (RuntimeError("Version mismatch"), "h:6379", r"the Ray at h:6379 could not be joined: RuntimeError: Version mismatch\."),
    ],
)
def test_what_ray_says_of_an_address_is_a_wrong_argument_with_a_remedy(error: Exception, address: str, told: str):
    said = refusal(error, address)
    assert isinstance(said, ConfigError)
    with pytest.raises(ConfigError, match=told):
        raise said


def test_a_private_ray_that_does_not_start_is_no_mistake_of_the_recipes():
    said = refusal(RuntimeError("out of disk"), None)
    assert type(said) is AgentRLError
    assert str(said) == "a private Ray could not be started: RuntimeError: out of disk. run.launcher=local does without Ray"
