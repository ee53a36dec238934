"""Learns the vocabulary: a byte-level BPE of 2,048 entries with DeepSeek's special tokens in front.

Ids 0..15 are the special tokens (`markup.SPECIAL_TOKENS`), then the 256 bytes, then merges. Digits
are split singly so that arithmetic sees the same numerals everywhere. The learner sees a slice of
each domain, and of the conversations only their words, so that no merge is spent on markup.

Writes `tokenizer.json` and `tokenizer_config.json` (with the chat template) for Hugging Face.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from libs.model.training import corpus, markup
from libs.model.training.script import console, run

VOCAB_SIZE = 2_048
MODEL_MAX_LENGTH = 2_048
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"

# Characters of each domain that the learner sees, so that no domain drowns another.
_LEARNT_CHARS = {"novels": 2_500_000, "scripture": 1_500_000, "docs": 1_500_000, "chat": 3_000_000}
_MARKUP = re.compile("|".join(re.escape(token) for token in markup.SPECIAL_TOKENS))


def train_tokenizer(lines: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A tokenizer of `vocab_size` entries, or fewer when the text has too few pairs to merge."""
    assert vocab_size >= len(markup.SPECIAL_TOKENS) + 256, vocab_size
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(markup.SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    for expected, token in enumerate(markup.SPECIAL_TOKENS):
        assert tokenizer.token_to_id(token) == expected, token
    return tokenizer


def learnt_lines(texts: Mapping[str, str]) -> Iterator[str]:
    """The lines that the learner sees of each domain in `texts`, without markup."""
    parts = (
        _MARKUP.sub("\n", text[: _LEARNT_CHARS[domain]]).split("\n")
        for domain, text in texts.items()
    )
    return itertools.chain.from_iterable(parts)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the tokenizer and its configuration into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / TOKENIZER_FILE))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": markup.BOS,
        "eos_token": markup.EOS,
        "pad_token": markup.PAD,
        "model_max_length": MODEL_MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": markup.CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=1, ensure_ascii=False)
    (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


def main(argv: Sequence[str]) -> int:
    """Command line: see `--help`."""
    parser = argparse.ArgumentParser(prog="tokenizer_trainer", description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True, help="folder made by `corpus`")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    options = parser.parse_args(argv)
    texts = corpus.load(options.corpus)
    tokenizer = train_tokenizer(learnt_lines(texts))
    save_tokenizer(tokenizer, options.out)
    console.print(f"{tokenizer.get_vocab_size()} entries -> {options.out / TOKENIZER_FILE}")
    return 0


if __name__ == "__main__":
    run(main)
