"""Golden generations: prompts, the tokens that follow, and SHA-256 hashes of all logits bits.

    python -m libs.model.golden --check [file]   exit code 1 and one line per difference
    python -m libs.model.golden --write [file]   after a deliberate change of arithmetic or weights

The hashes must hold on every machine, BLAS kernel and batch, with and without drafts; that is what
makes "the answer is the same" a statement about bits. Prompts are token ids, their text is beside
them for the reader.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from libs.model.engine import Engine
from libs.model.info import file_sha256
from libs.model.linear import Mode
from libs.model.reference import Generation, Reference, greedy, logit_hash
from libs.model.weights import Checkpoint, load_checkpoint, read_json

GOLDEN = Path(__file__).parent / "data" / "golden.json"
EXACT_MODES: tuple[Mode, ...] = ("int8", "fx")
MAX_TOKENS = 32
DRAFTS = (1, 2)

PROMPTS = {
    "chat_direct": "<｜begin▁of▁sentence｜><｜User｜>What is the capital of France?"
    "<｜Assistant｜></think>",
    "chat_thinking": "<｜begin▁of▁sentence｜><｜User｜>What is the opposite of hot?"
    "<｜Assistant｜><think>",
    "chat_tool_call": "<｜begin▁of▁sentence｜><｜User｜>What is the weather in Osaka?"
    "<｜Assistant｜><think>",
    "novel": "Emma Woodhouse was not at all",
    "scripture": "The LORD said to the king, ",
    "docs": "The function returns the :mod:`ctypes` object. The optional argument",
}


def measure(engine: Engine, prompt: list[int]) -> dict[str, Any]:
    """Tokens and hashes of one prompt, plain and with each number of drafts.

    Plain and speculative generation must agree in themselves before they are compared with a file.
    """
    reference = Reference(engine)
    stop = engine.args.eos_token_ids
    plain = reference.trace(prompt, greedy, MAX_TOKENS, stop)
    result: dict[str, Any] = {
        "tokens": list(plain.tokens),
        "logits_sha256": logit_hash(plain.logits),
        "drafts": {},
    }
    for drafts in DRAFTS:
        drafted = reference.speculate(prompt, MAX_TOKENS, stop, drafts=drafts)
        result["drafts"][str(drafts)] = _drafted(drafted)
    return result


def _drafted(generation: Generation) -> dict[str, Any]:
    return {
        "tokens": list(generation.tokens),
        "logits_sha256": logit_hash(generation.logits),
        "draft_logits_sha256": logit_hash(generation.draft_logits),
        "proposed": generation.proposed,
        "accepted": generation.accepted,
    }


def record(checkpoint: Checkpoint) -> dict[str, Any]:
    """The whole golden file for `checkpoint`."""
    tokenizer = Tokenizer.from_file(str(checkpoint.path / "tokenizer.json"))
    engines = {mode: Engine(checkpoint, mode) for mode in EXACT_MODES}
    cases = {}
    for name, text in PROMPTS.items():
        prompt = tokenizer.encode(text, add_special_tokens=False).ids
        modes = {mode: measure(engine, prompt) for mode, engine in engines.items()}
        shown = tokenizer.decode(modes["int8"]["tokens"], skip_special_tokens=False)
        cases[name] = {"text": text, "prompt": prompt, "int8_text": shown, "modes": modes}
    return {"files": _hashes(checkpoint), "cases": cases}


def differences(
    golden: dict[str, Any], checkpoint: Checkpoint, modes: tuple[Mode, ...] = EXACT_MODES
) -> Iterator[str]:
    """One line per golden value not reproduced here, and per draft that changed an answer."""
    if golden["files"] != _hashes(checkpoint):
        yield "the checkpoint's files are not those the golden file was made from"
        return
    for mode in modes:
        engine = Engine(checkpoint, mode)
        for name, case in golden["cases"].items():
            found, wanted = measure(engine, case["prompt"]), case["modes"][mode]
            if found != wanted:
                keys = ", ".join(key for key in wanted if found[key] != wanted[key])
                yield f"{name}, {mode}: {keys} differ"
            for drafts, drafted in found["drafts"].items():
                if drafted["logits_sha256"] != found["logits_sha256"]:
                    yield f"{name}, {mode}: {drafts} drafts change the main model's logits"


def _hashes(checkpoint: Checkpoint) -> dict[str, str]:
    return {path.name: file_sha256(path) for path in checkpoint.files}


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m libs.model.golden", description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="compare this machine with the file")
    action.add_argument("--write", action="store_true", help="replace the file")
    parser.add_argument("--mode", choices=EXACT_MODES, help="check one mode only")
    parser.add_argument("file", nargs="?", type=Path, default=GOLDEN)
    options = parser.parse_args(arguments)
    checkpoint = load_checkpoint()
    if options.write:
        text = json.dumps(record(checkpoint), indent=1, ensure_ascii=False)
        options.file.write_text(f"{text}\n", encoding="utf-8")
        return 0
    modes = (options.mode,) if options.mode else EXACT_MODES
    found = list(differences(read_json(options.file), checkpoint, modes))
    for line in found:
        sys.stdout.write(f"{line}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
