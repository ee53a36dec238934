"""Prompts of the kinds the shipped checkpoint was trained on, drawn from a seeded generator."""

from __future__ import annotations

import random

_COUNTRIES = ("France", "Japan", "Kenya", "Peru", "Norway", "Egypt", "Portugal", "Vietnam")
_CITIES = ("Osaka", "Lyon", "Shenzhen", "Boston", "Oxford", "Nairobi", "Lima", "Zurich")
_NAMES = ("Harriet", "Emma", "George", "Fanny", "Tom", "Charlotte")
_WORDS = ("hot", "early", "rich", "open", "long", "near", "strong", "happy")

_PASSAGE = (
    "It was a truth that nobody in the village disputed, that a ship which had been repaired as "
    "often as this one must by now be another ship. The captain, who had sailed her for thirty "
    "years, was of a different opinion; he said that he knew every plank of her, and that she "
    "knew him. His daughter, who kept the accounts, observed that she knew every plank as well, "
    "since she had paid for all of them, and most of them twice. When the wind turned in the "
    "evening they walked down to the harbour together, and neither of them spoke of it again. "
    "In the beginning there was the word, and the word was written down, and the book in which "
    "it stood was copied by hand. The function returns a new list; its optional argument gives "
    "the key by which items are compared. "
)


def chat_question(rng: random.Random) -> str:
    """A question that the checkpoint can answer or at least parse."""
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    return rng.choice(
        (
            f"What is the capital of {rng.choice(_COUNTRIES)}?",
            f"What is the weather in {rng.choice(_CITIES)}?",
            f"What time is it in {rng.choice(_CITIES)}?",
            f"Hello, my name is {rng.choice(_NAMES)}.",
            f"What is the opposite of {rng.choice(_WORDS)}?",
            f"What is {a} + {b}?",
            "Who are you?",
            "Tell me a story.",
            "Read me a passage from scripture.",
        )
    )


def passage(rng: random.Random, words: int) -> str:
    """About `words` words of prose from a random place."""
    source = _PASSAGE.split()
    start = rng.randrange(len(source))
    return " ".join(source[(start + i) % len(source)] for i in range(words))
