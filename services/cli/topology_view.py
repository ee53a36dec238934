"""`xds topology`: the pod of a topology file, drawn and as data."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.tree import Tree

from libs.config.plan import ActorPlan, PodPlan, expert_placement
from libs.model.resources import ModelResources


def topology_data(plan: PodPlan, model: ModelResources) -> dict[str, Any]:
    """Everything the drawing shows, as one document."""
    topology = plan.topology
    experts = model.args.n_routed_experts
    placements = {te.name: expert_placement(plan, te.name, experts) for te in topology.decode_tes}
    return {
        "name": topology.name,
        "description": topology.description,
        "model": topology.model.checkpoint,
        "engine": topology.model.engine,
        "profile": topology.profile,
        "dies": plan.num_dies,
        "processes": len(plan.processes),
        "carrier": topology.fabric.carrier,
        "actors": [
            {"name": a.name, "role": a.role, "te": a.te, "dies": list(a.dies)} for a in plan.actors
        ],
        "experts": {
            te: {str(die): list(placement.experts_on(die)) for die in placement.dies}
            for te, placement in placements.items()
        },
    }


def topology_tree(plan: PodPlan, model: ModelResources) -> RenderableType:
    """The pod as a tree: edge, control, prefill TEs, decode TEs with their expert dies."""
    topology = plan.topology
    title = f"[bold]{topology.name}[/]  {topology.description}"
    facts = f"{model.name} ({model.mode}), timed as {topology.profile}, {plan.num_dies} dies"
    tree = Tree(f"{title}\n{facts}, {len(plan.processes)} processes")
    edge = tree.add("edge and control")
    for role in ("gateway", "job_executor", "control_plane", "fabric_emulator"):
        edge.add(", ".join(actor.name for actor in plan.of_role(role)))
    for prefill in topology.prefill_tes:
        branch = tree.add(f"[cyan]prefill TE {prefill.name}[/]")
        for group in plan.of_te(prefill.name, "prefill_te"):
            branch.add(f"{group.name}  {_dies(group)}  TP=4  + output process")
    for decode in topology.decode_tes:
        branch = tree.add(f"[green]decode TE {decode.name}[/]  batch <= {decode.batch_max} per die")
        for group in plan.of_te(decode.name, "decode_te"):
            branch.add(f"{group.name}  {_dies(group)}  attention  + output process")
        placement = expert_placement(plan, decode.name, model.args.n_routed_experts)
        for die in plan.of_te(decode.name, "expert_die"):
            experts = placement.experts_on(die.dies[0])
            branch.add(f"{die.name}  {_dies(die)}  experts {_experts(experts, model)}")
    flows = tree.add("KV: one DistFlow instance per pair of TEs")
    flows.add(", ".join(actor.name for actor in plan.of_role("distflow")))
    return tree


def _dies(actor: ActorPlan) -> str:
    first, last = actor.dies[0], actor.dies[-1]
    return f"die {first}" if first == last else f"dies {first}-{last}"


def _experts(experts: tuple[int, ...], model: ModelResources) -> str:
    shared = model.args.n_routed_experts
    return " ".join("shared" if expert == shared else str(expert) for expert in experts)
