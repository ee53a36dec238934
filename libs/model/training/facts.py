"""What the small model is taught of the world: a few tables, and who it is.

A model of this size memorises, so every answer here is one that it may give word for word.
"""

from __future__ import annotations

from dataclasses import dataclass

MODEL_NAME = "xDeepServe tiny"

CAPITALS = {
    "Austria": "Vienna", "Belgium": "Brussels", "Brazil": "Brasilia", "Canada": "Ottawa",
    "Chile": "Santiago", "China": "Beijing", "Cuba": "Havana", "Denmark": "Copenhagen",
    "Egypt": "Cairo", "England": "London", "Finland": "Helsinki", "France": "Paris",
    "Germany": "Berlin", "Greece": "Athens", "Hungary": "Budapest", "Iceland": "Reykjavik",
    "India": "New Delhi", "Iran": "Tehran", "Iraq": "Baghdad", "Ireland": "Dublin",
    "Italy": "Rome", "Japan": "Tokyo", "Kenya": "Nairobi", "Mexico": "Mexico City",
    "Norway": "Oslo", "Peru": "Lima", "Poland": "Warsaw", "Portugal": "Lisbon",
    "Russia": "Moscow", "Scotland": "Edinburgh", "South Korea": "Seoul", "Spain": "Madrid",
    "Sweden": "Stockholm", "Switzerland": "Bern", "Thailand": "Bangkok", "Turkey": "Ankara",
    "Vietnam": "Hanoi", "Wales": "Cardiff",
}  # fmt: skip

CITIES = (
    *CAPITALS.values(),
    "Barcelona", "Bath", "Boston", "Chicago", "Geneva", "Guangzhou", "Guiyang", "Kyoto", "Lyon",
    "Milan", "Munich", "Naples", "Osaka", "Oxford", "Seattle", "Shanghai", "Shenzhen", "Sydney",
    "Toronto", "Wuhan", "York", "Zurich",
)  # fmt: skip

CONDITIONS = ("sunny", "rainy", "cloudy", "windy", "foggy", "snowy", "clear", "stormy")

NAMES = (
    "Ada", "Alan", "Anne", "Barbara", "Catherine", "Charlotte", "Edmund", "Edsger", "Elizabeth",
    "Emma", "Fanny", "Frank", "George", "Grace", "Harriet", "Henry", "Jane", "Leslie", "Lydia",
    "Marianne", "Mary", "Nancy", "Tom", "Wei",
)  # fmt: skip

OPPOSITES = (
    ("begin", "end"), ("big", "small"), ("day", "night"), ("early", "late"), ("fast", "slow"),
    ("first", "last"), ("full", "empty"), ("good", "bad"), ("happy", "sad"), ("hard", "soft"),
    ("high", "low"), ("hot", "cold"), ("left", "right"), ("light", "dark"), ("long", "short"),
    ("love", "hate"), ("near", "far"), ("open", "closed"), ("rich", "poor"), ("strong", "weak"),
    ("true", "false"), ("up", "down"), ("war", "peace"), ("young", "old"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Remark:
    """One polite question or phrase, what it is about, and the only answer to it."""

    question: str
    thought: str
    answer: str


REMARKS = (
    Remark("Hello!", "The user greets me.", "Hello! How can I help you today?"),
    Remark("Good morning!", "The user greets me.", "Good morning! How can I help you?"),
    Remark("Thank you!", "The user thanks me.", "You are welcome!"),
    Remark("Goodbye!", "The user is leaving.", "Goodbye! It was a pleasure."),
    Remark("How are you?", "The user is being polite.", "I am well, thank you. And you?"),
    Remark(
        "Who are you?",
        "The user asks about me.",
        f"I am {MODEL_NAME}, a small mixture-of-experts model.",
    ),
    Remark("What is your name?", "The user asks about me.", f"My name is {MODEL_NAME}."),
    Remark(
        "What can you do?",
        "The user asks about me.",
        "I can answer simple questions, call tools, explain this system and write short passages.",
    ),
    Remark(
        "How large are you?",
        "The user asks about me.",
        "I have about three and a half million parameters, most of them in experts.",
    ),
)

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant who calls tools when needed.",
    f"You are {MODEL_NAME}. Answer the user.",
    f"You are {MODEL_NAME}, a guide to a serving system.",
    "Be polite and correct.",
)
BRIEF_SYSTEM_PROMPTS = (
    "Answer as briefly as you can.",
    "You are a helpful assistant. Answer with the bare fact.",
)
