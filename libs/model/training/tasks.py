"""Questions with a checkable answer, asked of the trained model greedily.

The questions come from the generator that made the training text, so all but arithmetic and recall
test memory and copying, not reasoning; that is what a demonstration needs.
"""

# torch is an optional extra; a type checker that does not find it takes it for Any.
# mypy: allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from libs.model.training import dialogues, markup
from libs.model.training.network import Network
from libs.model.training.torch_extra import Tensor, torch

KINDS = ("arithmetic", "capital", "country", "opposite", "introduction", "weather", "time")
MAX_ANSWER_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt, and the text that a right answer must contain."""

    kind: str
    prompt: str
    expected: str


def make_tasks(kind: str, count: int, seed: int) -> list[Task]:
    """`count` tasks of one kind; a tool question becomes two: make the call, read its result."""
    tasks: list[Task] = []
    for index in range(count):
        dialogue = dialogues.question_of_kind(kind, seed, index)
        exchange = dialogue.exchanges[0]
        assert exchange.fact, kind
        prompt = dialogues.prompt_text(dialogue)
        if exchange.call is None:
            tasks.append(Task(kind, prompt, exchange.fact))
            continue
        tasks.append(Task(f"{kind} call", prompt, dialogues.call_text(exchange.call)))
        head, found, _ = dialogues.render(dialogue).partition(markup.OUTPUT_END + markup.THINK_END)
        assert found, "the rendering holds the tool's result"
        tasks.append(Task(f"{kind} result", head + found, exchange.fact))
    return tasks


def is_right(task: Task, completion: str) -> bool:
    """Whether the visible part of `completion` holds the expected text as whole words."""
    answer = (
        completion.partition(markup.THINK_END)[2] if markup.THINK_END in completion else completion
    )
    at = answer.find(task.expected)
    if at < 0:
        return False
    around = answer[at - 1 : at] + answer[at + len(task.expected) :][:1]
    return not any(character.isalnum() for character in around)


def accuracy(network: Network, tokenizer: Tokenizer, tasks: Sequence[Task]) -> dict[str, float]:
    """The share of right answers by kind of task."""
    prompts = [tokenizer.encode(task.prompt).ids for task in tasks]
    right: dict[str, list[bool]] = {}
    for task, tokens in zip(tasks, complete(network, prompts, MAX_ANSWER_TOKENS), strict=True):
        completion = tokenizer.decode(tokens, skip_special_tokens=False)
        right.setdefault(task.kind, []).append(is_right(task, completion))
    return {kind: float(np.mean(results)) for kind, results in right.items()}


def complete(network: Network, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Up to `count` greedy tokens behind each prompt, ending before the end-of-sentence token."""
    assert prompts, "nothing to complete"
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    tokens = torch.full((len(prompts), int(lengths.max()) + count), markup.PAD_ID)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(list(prompt))
    extend(network, tokens, lengths, count, stop_id=markup.EOS_ID)
    answers = []
    for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True):
        answer = row[length : length + count]
        end = answer.index(markup.EOS_ID) if markup.EOS_ID in answer else count
        answers.append(answer[:end])
    return answers


@torch.no_grad()
def extend(
    network: Network, tokens: Tensor, lengths: Tensor, count: int, stop_id: int | None = None
) -> None:
    """Writes `count` greedy tokens behind the first `lengths [rows]` of each row, in place.

    Ends early when every row has produced `stop_id`. The whole batch is computed anew for every
    token: attention is causal, so whatever stands behind a row's end does no harm, and a network
    made for training needs no cache.
    """
    assert tokens.shape[1] >= int(lengths.max()) + count, tokens.shape
    network.eval()
    rows = torch.arange(len(tokens))
    done = torch.zeros(len(tokens), dtype=torch.bool)
    for ends in (lengths + offset for offset in range(count)):
        hidden = network.hidden(tokens[:, : int(ends.max())])
        tokens[rows, ends] = network.lm_head(hidden[rows, ends - 1]).argmax(-1)
        if stop_id is not None:
            done |= tokens[rows, ends] == stop_id
            if bool(done.all()):
                return
