"""Constants of the interconnect, each with its source and whether it is given or assumed.

Unit rule of the whole project: a chip is two dies; parallelism is counted in dies, throughput is
reported per chip, batch is per die.
"""

from __future__ import annotations

from dataclasses import dataclass

from libs import units


@dataclass(frozen=True, slots=True)
class FabricParams:
    """What each plane charges per link and per exchange."""

    #: Unidirectional UB bandwidth of one die (given: CloudMatrix384, arXiv 2506.12708; 392 GB/s
    #: per chip).
    ub_bytes_per_s: int = 196_000_000_000
    #: Latency of one remote access: 1.2 us within a server and under 1 us more across servers
    #: (given, secondary source); access is near uniform (P025), so one figure serves all pairs.
    ub_latency_ns: int = units.us(1.9)
    #: RoCE bandwidth of one die and direction: 400 Gb/s per 910C chip of two dies, 200 Gb/s per
    #: 910B die (given: CloudMatrix384, arXiv 2506.12708).
    roce_bytes_per_s: int = 25_000_000_000
    #: Latency of one RoCE exchange (assumed; a usual figure of RDMA through two switches).
    roce_latency_ns: int = units.us(5.0)
    #: VPC bandwidth of one server and direction: a 400 Gb/s card (given, secondary source).
    vpc_bytes_per_s: int = 50_000_000_000
    #: Latency of one exchange over the VPC (assumed; no figure is published).
    vpc_latency_ns: int = units.us(50)
    #: Frames of one ordered pair of dies that may be under way at once (assumed; no figure is
    #: published). 64 blocks of KV cover the UB plane's bandwidth times latency a hundredfold, so
    #: only a congested target is ever felt at its senders.
    in_flight_frames_max: int = 64
    #: Start-up of one P2P send, all protocol steps (fitted to Fig. 5 of P037: 1-5 us is feasible).
    p2p_startup_ns: int = units.us(5.0)
    #: One stage of A2E (fitted: two stages and the volume give the 172 us of P047).
    a2e_stage_ns: int = units.us(39.7)
    #: One stage of E2A (fitted likewise: 193 us, P047).
    e2a_stage_ns: int = units.us(26.2)
    #: One control message over the VPC plane (assumed; no figure is published).
    control_latency_ns: int = units.us(50)


UB = FabricParams()
