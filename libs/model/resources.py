"""The served model of one process: checkpoint, tokenizer, template and engines, each loaded once.

A process that only routes loads only the tokenizer; an expert die loads only its experts. Where a
parent has loaded the whole engine before forking, its children share those pages and build
nothing again.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from libs.errors import BadInput
from libs.model.any_engine import AnyEngine
from libs.model.args import ModelArgs
from libs.model.chat import ChatTemplate
from libs.model.digest import DIGEST, DigestEngine, digest_args
from libs.model.engine import Engine, Parts
from libs.model.kv import PagedKv
from libs.model.tokenizer import Tokenizer
from libs.model.weights import Checkpoint, load_checkpoint, read_json

SHIPPED = Path(__file__).parent / "data"


def checkpoint_dir(name_or_path: str) -> Path:
    """The folder of a checkpoint: a path, or the name of a shipped one."""
    for candidate in (SHIPPED / name_or_path, Path(name_or_path)):
        if (candidate / "config.json").is_file():
            return candidate
    shipped = ", ".join(sorted(item.name for item in SHIPPED.iterdir() if item.is_dir()))
    message = f"no checkpoint at {name_or_path!r} (no config.json there); shipped: {shipped}"
    raise BadInput(message, field="model.checkpoint")


class ModelResources:
    """Everything of one checkpoint in one engine mode, loaded on first use."""

    def __init__(self, checkpoint: str, mode: str = "int8") -> None:
        self.directory = checkpoint_dir(checkpoint)
        self.name = self.directory.name
        self.mode = mode
        self._engine: AnyEngine | None = None

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The tensors."""
        return load_checkpoint(self.directory)

    @cached_property
    def args(self) -> ModelArgs:
        """The architecture, with the rows of the engine; reads the small config alone."""
        args = ModelArgs.from_config(read_json(self.directory / "config.json"))
        return digest_args(args) if self.mode == DIGEST else args

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        return Tokenizer.load(self.directory)

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template."""
        return ChatTemplate.load(self.directory)

    def engine(self) -> AnyEngine:
        """The whole model."""
        if self._engine is None:
            self._engine = self._built(Parts())
        return self._engine

    def attention_engine(self) -> AnyEngine:
        """Everything but the experts; the whole engine if that is loaded already."""
        return self._engine or self._built(Parts(experts={}))

    def expert_engine(self, experts: Iterable[int]) -> AnyEngine:
        """Only `experts` (of every MoE layer); the whole engine if that is loaded already."""
        if self._engine is not None:
            return self._engine
        args, held = self.args, tuple(experts)
        layers = range(args.first_k_dense_replace, args.num_hidden_layers)
        return self._built(Parts(attention=False, experts=dict.fromkeys(layers, held)))

    def _built(self, parts: Parts) -> AnyEngine:
        # Digests need no weights, so the checkpoint is not even opened for them.
        if self.mode == DIGEST:
            return DigestEngine(self.args, parts)
        return Engine(self.checkpoint, self.mode, parts)

    def paged_kv(self, num_blocks: int, block_size: int) -> PagedKv:
        """KV memory for the main layers."""
        args = self.args
        return PagedKv(num_blocks, block_size, args.num_hidden_layers, args.kv_width)
