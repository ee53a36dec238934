"""Between torch modules and the public checkpoint layout, in both directions.

    config.json          the model's shape
    model.safetensors    main layers and the first MTP layer, bfloat16; routers in float32
    mtp2.safetensors     a second trained MTP layer, when there is one, in its own file so that the
                         main file stays an ordinary one-MTP checkpoint
    tokenizer.json, tokenizer_config.json

Parameter names are the public ones already; only the stacks of experts are cut up. What was written
is opened again with `libs.model.weights.load_checkpoint`, which checks every name and shape.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from libs.errors import BadInput
from libs.model.args import ModelArgs
from libs.model.training import recipe
from libs.model.training.network import Network
from libs.model.training.script import console, run
from libs.model.training.tokenizer_trainer import CONFIG_FILE, TOKENIZER_FILE
from libs.model.training.torch_extra import Tensor, torch
from libs.model.weights import Checkpoint, load_checkpoint

MAIN_FILE = "model.safetensors"
SECOND_MTP_FILE = "mtp2.safetensors"
_ROUTER = re.compile(r"\.mlp\.gate\.(weight|e_score_correction_bias)$")
_STACK = re.compile(r"^(.*\.mlp\.experts\.)(gate_up|down)$")


def public_tensors(network: Network) -> dict[str, Tensor]:
    """Every tensor under its public name, in its storage type."""
    tensors: dict[str, Tensor] = {}
    for name, value in network.state_dict().items():
        stack = _STACK.match(name)
        if stack is None:
            dtype = torch.float32 if _ROUTER.search(name) else torch.bfloat16
            tensors[name] = value.to(dtype).contiguous()
        else:
            tensors |= _cut(stack[1], stack[2], value.to(torch.bfloat16))
    return tensors


def _cut(prefix: str, part: str, stack: Tensor) -> dict[str, Tensor]:
    """One tensor per expert and projection out of a stack `[experts, ...]`."""
    cut: dict[str, Tensor] = {}
    for expert, matrix in enumerate(stack):
        if part == "down":
            cut[f"{prefix}{expert}.down_proj.weight"] = matrix.clone()
        else:
            gate, up = matrix.chunk(2, dim=0)
            cut[f"{prefix}{expert}.gate_proj.weight"] = gate.clone()
            cut[f"{prefix}{expert}.up_proj.weight"] = up.clone()
    return cut


def save_checkpoint(network: Network, folder: Path, config: Mapping[str, Any]) -> Checkpoint:
    """Writes `network` into `folder` and opens it again; `config` is written as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=1) + "\n")
    main, second = _split(network)
    _save(main, folder / MAIN_FILE)
    # A second layer of an earlier model must not stay beside a new main file.
    (folder / SECOND_MTP_FILE).unlink(missing_ok=True)
    if second:
        save_second_mtp(network, folder)
    return load_checkpoint(folder)


def save_second_mtp(network: Network, folder: Path) -> Path:
    """Writes the second MTP layer of `network` beside its main file and checks that both open."""
    _, second = _split(network)
    assert second, "the network has no second MTP layer"
    _save(second, folder / SECOND_MTP_FILE)
    load_checkpoint(folder)
    return folder / SECOND_MTP_FILE


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # the writer makes a private file; a checkpoint is there to be read by all


def _split(network: Network) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of the main file, and those of the second MTP layer."""
    prefix = f"model.layers.{network.args.num_hidden_layers + 1}."
    main: dict[str, Tensor] = {}
    second: dict[str, Tensor] = {}
    for name, tensor in public_tensors(network).items():
        (second if name.startswith(prefix) else main)[name] = tensor
    return main, second


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies the tokenizer's two files; copying a folder onto itself does nothing."""
    for name in (TOKENIZER_FILE, CONFIG_FILE):
        if not (source / name).is_file():
            raise BadInput(f"no {name} in {source}", field="tokenizer")
        if source.resolve() != target.resolve():
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)


def load_network(folder: Path | None = None) -> Network:
    """A network with the weights of a checkpoint folder, by default the shipped one."""
    checkpoint = load_checkpoint(folder)
    network = Network(checkpoint.args)
    network.load_state_dict(
        {name: _stored(checkpoint, name) for name in network.state_dict()}, strict=True
    )
    return network


def _stored(checkpoint: Checkpoint, name: str) -> Tensor:
    """The value of one network parameter, stacked out of the experts when it is a stack."""
    stack = _STACK.match(name)
    if stack is None:
        return _tensor(checkpoint, name)
    prefix, part = stack[1], stack[2]
    projections = ("down_proj",) if part == "down" else ("gate_proj", "up_proj")
    experts = (
        [_tensor(checkpoint, f"{prefix}{expert}.{proj}.weight") for proj in projections]
        for expert in range(checkpoint.args.n_routed_experts)
    )
    return torch.stack([torch.cat(parts, dim=0) for parts in experts])


def _tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    return torch.from_numpy(checkpoint.tensor(name).copy())


def main(argv: Sequence[str]) -> int:
    """Command line: see `--help`."""
    parser = argparse.ArgumentParser(prog="export", description=__doc__.split("\n")[0])
    parser.add_argument("--state", type=Path, required=True, help="training.pt of a run")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    options = parser.parse_args(argv)
    if not options.state.is_file():
        raise BadInput(f"no such file: {options.state}", field="state")
    saved = torch.load(options.state, weights_only=True)
    network = Network(ModelArgs.from_config(recipe.MODEL_CONFIG))
    network.load_state_dict(saved["network"])
    copy_tokenizer(options.tokenizer, options.out)
    checkpoint = save_checkpoint(network, options.out, recipe.MODEL_CONFIG)
    console.print(f"{len(checkpoint.stored)} tensors -> {options.out}")
    return 0


if __name__ == "__main__":
    run(main)
