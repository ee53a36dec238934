"""The topology file: how many of each service, and what the emulated timeline charges.

A file is YAML, validated strictly: an unknown key, a wrong type or an impossible number is reported
with its path in the file, one line per problem, and nothing is started. `libs.config.plan` turns a
valid topology into the list of actors, dies and subjects that every host uses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from libs.errors import BadInput

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9]{0,15}$")]

CarrierName = Literal["nats", "shm"]
#: How a decode TE-shell chooses a DP group; `libs.scheduling.routing` tells what each does.
RoutingName = Literal["least_kv", "round_robin", "shortest_queue", "two_choices"]

#: Dies of one prefill DP group: attention runs with TP=4 there (P094).
PREFILL_TP = 4
#: Dies of a 910C chip (P026) and of a 910B chip (given: Ascend 910B is one die), and the chips of
#: a 910B server (given: as of a SuperPod server, P024).
DIES_PER_CHIP = 2
DIES_PER_910B_SERVER = 8

TOPOLOGY_DIR = Path(__file__).resolve().parents[2] / "deploy" / "topologies"


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class ModelSection(_Section):
    """Which tensors really flow."""

    checkpoint: str = "xds-tiny"
    engine: Literal["int8", "fx", "f32", "digest"] = "int8"


class KvSection(_Section):
    """Paged KV memory of one DP group.

    With `prefix_cache` a prefill DP group keeps the KV of prompts for those that begin alike;
    `host_blocks` blocks that had to make room live on in host memory.
    """

    block_size: Annotated[int, Field(ge=1, le=256)] = 16
    prefill_blocks: Annotated[int, Field(ge=8, le=65536)] = 512
    decode_blocks: Annotated[int, Field(ge=8, le=65536)] = 1024
    prefix_cache: bool = True
    host_blocks: Annotated[int, Field(ge=0, le=262_144)] = 0


class PrefillTeSection(_Section):
    """One prefill task executor."""

    name: Name
    dp_groups: Annotated[int, Field(ge=1, le=64)] = 1
    queue_max: Annotated[int, Field(ge=1, le=4096)] = 256


class DecodeTeSection(_Section):
    """One decode task executor with the expert dies that serve it."""

    name: Name
    dp_groups: Annotated[int, Field(ge=1, le=512)] = 2
    batch_max: Annotated[int, Field(ge=1, le=512)] = 24
    queue_max: Annotated[int, Field(ge=1, le=4096)] = 256
    expert_dies: Annotated[int, Field(ge=1, le=512)] = 4
    routing: RoutingName = "least_kv"


class FabricSection(_Section):
    """The emulated interconnect, and what really carries its frames.

    `nats`: through the broker and the emulator's shards. `shm`: between processes of one host
    through shared memory, straight to the owner of the die, whose process stamps what arrives; the
    broker still carries what goes to another host.
    """

    shards: Annotated[int, Field(ge=1, le=16)] = 1
    carrier: CarrierName = "nats"


class HardwareSection(_Section):
    """The machine under the pod: one SuperPod of 910C servers, and 910B servers beside it.

    `servers` follows from the dies in use unless given. The prefill TEs named in `on_910b` sit on
    the 910B servers and send their KV over `outside_plane` (P104).
    """

    servers: Annotated[int, Field(ge=1, le=48)] | None = None
    chips_per_server: Annotated[int, Field(ge=1, le=8)] = 8
    outside_910b_servers: Annotated[int, Field(ge=0, le=1024)] = 0
    outside_plane: Literal["roce", "vpc"] = "roce"
    on_910b: tuple[Name, ...] = ()


class JitterSection(_Section):
    """What keeps a die from being late at a dispatch, where all others wait for it (P060-P064).

    The garbage collector runs after every `gc_every` iterations instead of at any moment (0: at
    any moment). `pin_cores` gives every process that owns a die one core of the host in turn:
    right where there are as many cores as dies.
    """

    gc_every: Annotated[int, Field(ge=0, le=1_000_000)] = 300
    pin_cores: bool = False


class LimitsSection(_Section):
    """What the API admits; each is checked before any die is touched."""

    context_max_tokens: Annotated[int, Field(ge=16, le=1_048_576)] = 2048
    prompt_max_tokens: Annotated[int, Field(ge=1, le=1_048_576)] = 1536
    output_max_tokens: Annotated[int, Field(ge=1, le=1_048_576)] = 1024
    output_default_tokens: Annotated[int, Field(ge=1, le=1_048_576)] = 256
    requests_in_flight_max: Annotated[int, Field(ge=1, le=65536)] = 512
    choices_max: Annotated[int, Field(ge=1, le=128)] = 16
    body_max_bytes: Annotated[int, Field(ge=1024, le=64 << 20)] = 1 << 20
    request_timeout_s: Annotated[float, Field(gt=0, le=7200)] = 300.0


class HealthSection(_Section):
    """Heartbeat periods of the two levels, in real seconds under the asyncio host."""

    control_period_s: Annotated[float, Field(gt=0, le=60)] = 0.5
    te_period_s: Annotated[float, Field(gt=0, le=60)] = 0.5
    silent_after_periods: Annotated[int, Field(ge=2, le=100)] = 4


class Topology(_Section):
    """A whole pod."""

    name: Name
    description: str = ""
    model: ModelSection = ModelSection()
    profile: Literal["deepseek-r1", "xds-tiny"] = "deepseek-r1"
    kv: KvSection = KvSection()
    gateways: Annotated[int, Field(ge=1, le=8)] = 1
    job_executors: Annotated[int, Field(ge=1, le=16)] = 2
    prefill_tes: Annotated[tuple[PrefillTeSection, ...], Field(min_length=1, max_length=64)]
    decode_tes: Annotated[tuple[DecodeTeSection, ...], Field(min_length=1, max_length=16)]
    fabric: FabricSection = FabricSection()
    hardware: HardwareSection = HardwareSection()
    jitter: JitterSection = JitterSection()
    limits: LimitsSection = LimitsSection()
    health: HealthSection = HealthSection()

    @model_validator(mode="after")
    def _consistent(self) -> Topology:
        names = [te.name for te in self.prefill_tes] + [te.name for te in self.decode_tes]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"TE names must be unique, used twice: {', '.join(twice)}")
        limits = self.limits
        if limits.prompt_max_tokens >= limits.context_max_tokens:
            raise ValueError("limits.prompt_max_tokens must be below limits.context_max_tokens")
        if limits.output_default_tokens > limits.output_max_tokens:
            raise ValueError(
                "limits.output_default_tokens must not exceed limits.output_max_tokens"
            )
        for pool in ("prefill_blocks", "decode_blocks"):
            if getattr(self.kv, pool) * self.kv.block_size < limits.context_max_tokens:
                raise ValueError(f"kv.{pool} cannot hold one request of limits.context_max_tokens")
        if self.kv.host_blocks and not self.kv.prefix_cache:
            raise ValueError("kv.host_blocks needs kv.prefix_cache: it holds what that evicts")
        self._check_hardware()
        return self

    def _check_hardware(self) -> None:
        prefill = {te.name for te in self.prefill_tes}
        for name in self.hardware.on_910b:
            if name in {te.name for te in self.decode_tes}:
                raise ValueError(
                    f"hardware.on_910b: {name} is a decode TE; 910B servers are outside the UB"
                    " plane, which its iterations need, and may only prefill"
                )
            if name not in prefill:
                raise ValueError(f"hardware.on_910b: there is no prefill TE {name}")
        hardware, outside = self.hardware, self.outside_dies_in_use
        outside_dies = hardware.outside_910b_servers * DIES_PER_910B_SERVER
        if outside > outside_dies:
            raise ValueError(
                f"hardware.outside_910b_servers: {outside} dies in use, {outside_dies} there"
            )
        if self.pod_dies_in_use > self.pod_servers * self.dies_per_server:
            dies = self.pod_servers * self.dies_per_server
            raise ValueError(f"hardware.servers: {self.pod_dies_in_use} dies in use, {dies} there")

    @property
    def dies_per_server(self) -> int:
        """Dies of one server of the SuperPod."""
        return self.hardware.chips_per_server * DIES_PER_CHIP

    @property
    def outside_dies_in_use(self) -> int:
        """Dies that the TEs on 910B servers take."""
        groups = (te.dp_groups for te in self.prefill_tes if te.name in self.hardware.on_910b)
        return PREFILL_TP * sum(groups)

    @property
    def pod_dies_in_use(self) -> int:
        """Dies that everything else takes, inside the SuperPod."""
        prefill = PREFILL_TP * sum(te.dp_groups for te in self.prefill_tes)
        decode = sum(te.dp_groups + te.expert_dies for te in self.decode_tes)
        return prefill + decode - self.outside_dies_in_use

    @property
    def pod_servers(self) -> int:
        """Servers of the SuperPod: as the file says, or as many as the dies in use need."""
        given = self.hardware.servers
        return given or max(1, -(-self.pod_dies_in_use // self.dies_per_server))


def problems_of(error: ValidationError) -> list[str]:
    """One line per problem, each with its path in the file."""
    return [
        f"{'.'.join(str(part) for part in item['loc']) or '(file)'}: {item['msg']}"
        for item in error.errors()
    ]


def parse_topology(text: str, *, source: str) -> Topology:
    """Validate YAML text; raises `BadInput` whose message lists every problem, one per line."""
    try:
        # YAML knows no tuples; strict mode is about scalars, so sequences are turned here.
        raw = _tuples(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise BadInput(f"{source}: not YAML: {error}", field=source) from error
    except RecursionError as error:
        # An alias to a node around it, or nesting that no honest file has.
        raise BadInput(f"{source}: nested too deeply", field=source) from error
    if not isinstance(raw, dict):
        raise BadInput(f"{source}: expected a mapping at the top", field=source)
    try:
        return Topology.model_validate(raw)
    except ValidationError as error:
        lines = "\n".join(f"{source}: {line}" for line in problems_of(error))
        raise BadInput(lines, field=source) from error


def load_topology(path_or_name: str, carrier: str = "") -> Topology:
    """Read a topology file, or a shipped one by its bare name (`mini`).

    `carrier` says otherwise than the file what carries UB frames.
    """
    path = Path(path_or_name)
    if not path.suffix and not path.exists():
        path = TOPOLOGY_DIR / f"{path_or_name}.yaml"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        shipped = ", ".join(sorted(item.stem for item in TOPOLOGY_DIR.glob("*.yaml")))
        reason = f"cannot read topology {path}: {error.strerror}; shipped ones: {shipped}"
        raise BadInput(reason, field="topology") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"topology {path} is not UTF-8 text", field="topology") from error
    topology = parse_topology(text, source=str(path_or_name))
    return topology if not carrier else _carried_by(topology, carrier)


def _carried_by(topology: Topology, carrier: str) -> Topology:
    known = get_args(CarrierName)
    if carrier not in known:
        raise BadInput(f"carrier must be {' or '.join(known)}, not {carrier!r}", field="carrier")
    fabric = topology.fabric.model_copy(update={"carrier": carrier})
    return topology.model_copy(update={"fabric": fabric})


def _tuples(value: object) -> object:
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    return value
