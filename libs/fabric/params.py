"""Constants of the interconnect, each with its source and whether it is given or assumed.

Unit rule of the whole project: a chip is two dies; parallelism is counted in dies, throughput is
reported per chip, batch is per die.
"""

from __future__ import annotations

from dataclasses import dataclass

from libs import units


@dataclass(frozen=True, slots=True)
class FabricParams:
    """What the UB plane charges per die and per frame."""

    #: Unidirectional UB bandwidth of one die (given: CloudMatrix384, arXiv 2506.12708; 392 GB/s
    #: per chip).
    ub_bytes_per_s: int = 196_000_000_000
    #: Latency of one remote access: 1.2 us within a server and under 1 us more across servers
    #: (given, secondary source); access is near uniform (P025), so one figure serves all pairs.
    ub_latency_ns: int = units.us(1.9)
    #: Start-up of one P2P send, all protocol steps (fitted to Fig. 5 of P037: 1-5 us is feasible).
    p2p_startup_ns: int = units.us(5.0)
    #: One stage of A2E (fitted: two stages and the volume give the 172 us of P047).
    a2e_stage_ns: int = units.us(39.7)
    #: One stage of E2A (fitted likewise: 193 us, P047).
    e2a_stage_ns: int = units.us(26.2)
    #: One control message over the VPC plane (assumed; no figure is published).
    control_latency_ns: int = units.us(50)


UB = FabricParams()
