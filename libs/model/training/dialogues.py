"""Makes conversations: seeded, any number, each one independent of how many came before.

A `Dialogue` is data: an optional system prompt and one to three `Exchange`s, each with a question,
a thought, an answer and possibly a tool call with its result. `render` writes it exactly as the
chat template will at serving time: the thoughts of earlier turns are left out, the last turn thinks
or does not, and a tool result is answered without a new thought.

Callers: `corpus` writes the training text, `train --smoke` needs no other text, `evaluate` asks the
questions and looks for each exchange's `fact` in the answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from libs.model.training import facts, glossary, markup

MAX_OPERAND = 12  # a table that a small model can learn by heart
THINKING_SHARE = 0.7
SYSTEM_SHARE = 0.25
BRIEF_SHARE = 0.3  # of the dialogues with a system prompt
EXCHANGES = (1, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call: `arguments` and `result` are JSON texts."""

    name: str
    arguments: str
    result: str


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question and its answer; `fact` is the bare part that a right answer must contain."""

    kind: str
    question: str
    thought: str
    answer: str
    fact: str = ""
    call: ToolCall | None = None


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation; with `thinking` the last exchange shows its thought."""

    exchanges: tuple[Exchange, ...]
    thinking: bool
    system: str = ""

    def __post_init__(self) -> None:
        assert self.exchanges, "a dialogue has at least one exchange"


@dataclass(frozen=True, slots=True)
class Prose:
    """Paragraphs that the model may be asked to write; empty without the corpora."""

    novels: Sequence[str] = field(default=())
    scripture: Sequence[str] = field(default=())


# ---------------------------------------------------------------- kinds of exchange


def _arithmetic(rng: Random) -> list[Exchange]:
    a, b = rng.randint(0, MAX_OPERAND), rng.randint(0, MAX_OPERAND)
    sign, word = rng.choice((("+", "plus"), ("-", "minus"), ("*", "times")))
    if sign == "-" and b > a:
        a, b = b, a
    result = {"+": a + b, "-": a - b, "*": a * b}[sign]
    question = rng.choice(
        (
            f"What is {a} {sign} {b}?", f"What is {a} {word} {b}?",
            f"Please compute {a} {sign} {b}.", f"{a} {sign} {b} = ?",
        )
    )  # fmt: skip
    answer = rng.choice(
        (f"{a} {word} {b} is {result}.", f"The answer is {result}.", f"{a} {sign} {b} = {result}.")
    )
    thought = f"The user wants {a} {sign} {b}. {a} {sign} {b} = {result}."
    return [Exchange("arithmetic", question, thought, answer, str(result))]


def _capital(rng: Random) -> list[Exchange]:
    country, city = rng.choice(list(facts.CAPITALS.items()))
    question = rng.choice(
        (
            f"What is the capital of {country}?", f"Which city is the capital of {country}?",
            f"Tell me the capital of {country}.",
        )
    )  # fmt: skip
    thought = f"The user asks for the capital of {country}. It is {city}."
    return [Exchange("capital", question, thought, f"The capital of {country} is {city}.", city)]


def _country(rng: Random) -> list[Exchange]:
    country, city = rng.choice(list(facts.CAPITALS.items()))
    question = rng.choice(
        (f"Which country has the capital {city}?", f"{city} is the capital of which country?")
    )
    answer = f"{city} is the capital of {country}."
    return [Exchange("country", question, answer, answer, country)]


def _opposite(rng: Random) -> list[Exchange]:
    pair = rng.choice(facts.OPPOSITES)
    word, other = pair if rng.random() < 0.5 else pair[::-1]
    question = rng.choice((f"What is the opposite of {word}?", f"Give me the opposite of {word}."))
    answer = f"The opposite of {word} is {other}."
    return [Exchange("opposite", question, answer, answer, other)]


def _weather(rng: Random) -> list[Exchange]:
    city, condition = rng.choice(facts.CITIES), rng.choice(facts.CONDITIONS)
    degrees = rng.randint(-9, 38)
    question = rng.choice(
        (
            f"What is the weather in {city}?", f"How is the weather in {city} today?",
            f"Is it raining in {city}?", f"Please check the weather in {city}.",
        )
    )  # fmt: skip
    call = ToolCall(
        name="get_weather",
        arguments=json.dumps({"city": city}),
        result=json.dumps({"temperature": degrees, "condition": condition}),
    )
    thought = f"I need the weather in {city}. I will call get_weather."
    answer = f"It is {condition} in {city} and the temperature is {degrees} degrees."
    return [Exchange("weather", question, thought, answer, condition, call)]


def _time(rng: Random) -> list[Exchange]:
    city, clock = rng.choice(facts.CITIES), f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    question = rng.choice((f"What time is it in {city}?", f"Tell me the time in {city}."))
    call = ToolCall("get_time", json.dumps({"city": city}), json.dumps({"time": clock}))
    thought = f"I need the time in {city}. I will call get_time."
    return [Exchange("time", question, thought, f"It is {clock} in {city} now.", clock, call)]


def _introduction(rng: Random) -> list[Exchange]:
    name = rng.choice(facts.NAMES)
    question = rng.choice(
        (f"Hello, my name is {name}.", f"Hi, I am {name}.", f"My name is {name}. Nice to meet you.")
    )
    thought = f"The user is called {name}. I should greet {name}."
    met = Exchange(
        "introduction", question, thought, f"Hello, {name}! How can I help you today?", name
    )
    if rng.random() < 0.5:
        return [met]
    # The answer stands only in an earlier turn: it cannot be memorised, the model must look back.
    recall = Exchange(
        "recall", "What is my name?", f"The user is called {name}.", f"Your name is {name}.", name
    )
    return [met, recall]


def _remark(rng: Random) -> list[Exchange]:
    remark = rng.choice(facts.REMARKS)
    return [Exchange("remark", remark.question, remark.thought, remark.answer)]


def _system(rng: Random) -> list[Exchange]:
    choice = rng.randrange(len(glossary.TERMS) + len(glossary.TOPICS))
    if choice >= len(glossary.TERMS):
        topic = glossary.TOPICS[choice - len(glossary.TERMS)]
        thought = "The user asks about the system."
        return [Exchange("system", rng.choice(topic.questions), thought, topic.answer)]
    term = glossary.TERMS[choice]
    bare = term.name.removeprefix("a ").removeprefix("an ").removeprefix("the ")
    question = rng.choice(
        (
            f"What is {term.name}?", f"Explain {term.name}.", f"Tell me about {term.name}.",
            f"What does {bare} mean?",
        )
    )  # fmt: skip
    return [Exchange("system", question, f"The user asks about {bare}.", term.answer)]


_NOVEL_QUESTIONS = (
    "Tell me a story.", "Write a passage from a novel.",
    "Write something in the style of Jane Austen.",
)  # fmt: skip
_SCRIPTURE_QUESTIONS = ("Read me a passage from scripture.", "Quote a verse for me.")


def _passage(rng: Random, prose: Prose) -> list[Exchange]:
    from_novel = bool(prose.novels) and (not prose.scripture or rng.random() < 0.6)
    if from_novel:
        thought = "The user wants a passage from a novel."
        question, answer = rng.choice(_NOVEL_QUESTIONS), rng.choice(prose.novels)
    else:
        thought = "The user wants a passage from scripture."
        question, answer = rng.choice(_SCRIPTURE_QUESTIONS), rng.choice(prose.scripture)
    return [Exchange("passage", question, thought, answer)]


_KINDS: dict[str, tuple[float, Callable[[Random], list[Exchange]]]] = {
    "arithmetic": (0.18, _arithmetic),
    "capital": (0.13, _capital),
    "country": (0.05, _country),
    "opposite": (0.07, _opposite),
    "weather": (0.14, _weather),
    "time": (0.07, _time),
    "introduction": (0.07, _introduction),
    "remark": (0.05, _remark),
    "system": (0.16, _system),
}
PASSAGE_SHARE = 0.08


# ---------------------------------------------------------------- dialogues


def make_dialogue(seed: int, index: int, prose: Prose | None = None) -> Dialogue:
    """Dialogue number `index` of the stream `seed`; the same arguments always give the same one."""
    rng = Random(f"dialogue/{seed}/{index}")  # text seeds hash by SHA-512: equal on every machine
    exchanges: list[Exchange] = []
    for _ in range(rng.choice(EXCHANGES)):
        exchanges += _draw(rng, prose or Prose())
    system, brief = _draw_system(rng)
    if brief:
        exchanges = [_shortened(exchange) for exchange in exchanges]
    return Dialogue(tuple(exchanges), thinking=rng.random() < THINKING_SHARE, system=system)


def make_dialogues(count: int, seed: int, prose: Prose | None = None) -> Iterator[Dialogue]:
    """The first `count` dialogues of the stream `seed`."""
    return (make_dialogue(seed, index, prose) for index in range(count))


def question_of_kind(kind: str, seed: int, index: int) -> Dialogue:
    """A dialogue of a single exchange of `kind`, with its thought, for grading."""
    assert kind in _KINDS, kind
    rng = Random(f"question/{kind}/{seed}/{index}")
    _, build = _KINDS[kind]
    return Dialogue((build(rng)[0],), thinking=True)


def _draw(rng: Random, prose: Prose) -> list[Exchange]:
    if (prose.novels or prose.scripture) and rng.random() < PASSAGE_SHARE:
        return _passage(rng, prose)
    weights = [weight for weight, _ in _KINDS.values()]
    [(_, build)] = rng.choices(list(_KINDS.values()), weights)
    return build(rng)


def _draw_system(rng: Random) -> tuple[str, bool]:
    if rng.random() >= SYSTEM_SHARE:
        return "", False
    brief = rng.random() < BRIEF_SHARE
    return rng.choice(facts.BRIEF_SYSTEM_PROMPTS if brief else facts.SYSTEM_PROMPTS), brief


def _shortened(exchange: Exchange) -> Exchange:
    return replace(exchange, answer=f"{exchange.fact}.") if exchange.fact else exchange


# ---------------------------------------------------------------- rendering


def render(dialogue: Dialogue) -> str:
    """The training text of a dialogue, from the first special token to the last."""
    *earlier, last = dialogue.exchanges
    history = "".join(
        markup.USER + exchange.question + markup.ASSISTANT + markup.THINK_END + _answer(exchange)
        for exchange in earlier
    )
    opening = (
        markup.BOS + dialogue.system + history + markup.USER + last.question + markup.ASSISTANT
    )
    thought = (
        f"{markup.THINK}{last.thought}{markup.THINK_END}" if dialogue.thinking else markup.THINK_END
    )
    return opening + thought + _answer(last)


def prompt_text(dialogue: Dialogue) -> str:
    """What the model is given to answer: `render` up to the opened (or skipped) last thought."""
    tail = markup.THINK if dialogue.thinking else markup.THINK_END
    head, found, _ = render(dialogue).rpartition(
        markup.USER + dialogue.exchanges[-1].question + markup.ASSISTANT
    )
    assert found, "the last question is part of the rendering"
    return head + found + tail


def call_text(call: ToolCall) -> str:
    """The markup of one tool call, without its result."""
    body = markup.CALL + call.name + markup.SEP + call.arguments + markup.CALL_END
    return markup.CALLS + body + markup.CALLS_END


def _answer(exchange: Exchange) -> str:
    if exchange.call is None:
        return exchange.answer + markup.EOS
    result = f"{markup.OUTPUT}{exchange.call.result}{markup.OUTPUT_END}{markup.THINK_END}"
    return call_text(exchange.call) + markup.EOS + result + exchange.answer + markup.EOS


def messages(dialogue: Dialogue) -> list[dict[str, object]]:
    """The dialogue as OpenAI chat messages, up to and including the last question."""
    out: list[dict[str, object]] = []
    if dialogue.system:
        out.append({"role": "system", "content": dialogue.system})
    *earlier, last = dialogue.exchanges
    for exchange in earlier:
        out.append({"role": "user", "content": exchange.question})
        if exchange.call is not None:
            function = {"name": exchange.call.name, "arguments": exchange.call.arguments}
            calls = [{"id": "call", "type": "function", "function": function}]
            out.append({"role": "assistant", "content": None, "tool_calls": calls})
            out.append({"role": "tool", "tool_call_id": "call", "content": exchange.call.result})
        out.append({"role": "assistant", "content": exchange.answer})
    out.append({"role": "user", "content": last.question})
    return out
