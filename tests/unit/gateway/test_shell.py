"""How the gateway is put together: address, port, and its place among other gateways."""

from __future__ import annotations

import socket

import pytest

from libs.config.plan import plan_pod
from libs.config.topology import LimitsSection, load_topology
from libs.errors import BadInput
from libs.runtime.build import ServiceContext
from services.gateway.admission import Admission
from services.gateway.core import GatewayConfig, GatewayCore
from services.gateway.edge import HttpEdge
from services.gateway.metrics import GatewayMetrics
from services.gateway.shell import (
    CannotListen,
    HttpAddress,
    address_from_env,
    build,
    listening,
)
from tests.unit.gateway.fake_pod import MODEL, FakePod, Notes, saying


def an_edge() -> HttpEdge:
    core = GatewayCore(GatewayConfig("gateway.0", 4))
    metrics = GatewayMetrics(MODEL.name)
    pod = FakePod(core, metrics, saying("x"))
    return HttpEdge(core, pod, Admission(MODEL, LimitsSection(), core.name), metrics, Notes())


def test_the_address_comes_from_the_environment() -> None:
    assert address_from_env({}, shared=False) == HttpAddress("127.0.0.1", 8000, False)
    env = {"XDS_HTTP_HOST": "0.0.0.0", "XDS_HTTP_PORT": "9001"}
    assert address_from_env(env, shared=True) == HttpAddress("0.0.0.0", 9001, True)


@pytest.mark.parametrize("port", ["", "http", "-1", "65536", "80.0", "²"])
def test_a_bad_port_is_named(port: str) -> None:
    with pytest.raises(BadInput) as caught:
        address_from_env({"XDS_HTTP_PORT": port}, shared=False)
    assert caught.value.field == "XDS_HTTP_PORT"


def test_the_gateway_is_built_with_edge_and_metrics() -> None:
    plan = plan_pod(load_topology("mini"))
    built = build(ServiceContext(plan, plan.actor("gateway.0"), MODEL))
    assert isinstance(built.core, GatewayCore)
    assert built.core.name == "gateway.0"
    assert built.core.config.requests_max == plan.topology.limits.requests_in_flight_max
    assert built.edge is not None
    assert isinstance(built.sink, GatewayMetrics)


async def test_a_taken_port_is_one_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen, match=f"127.0.0.1:{port}"):
            async with listening(an_edge(), HttpAddress(port=port)):
                pass


async def test_gateways_of_one_host_can_share_a_port() -> None:
    async with (
        listening(an_edge(), HttpAddress(port=0, shared=True)) as port,
        listening(an_edge(), HttpAddress(port=port, shared=True)) as same,
    ):
        assert same == port
