"""What the small model is taught about this system: its words, and the questions people ask.

The answers are short enough to be learnt by heart and are the project's own wording; they say
what the design does, so a reader may take this file for a glossary.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Term:
    """A word of the system: `name` with its article, and one answer that explains it."""

    name: str
    answer: str


TERMS = (
    Term(
        "a SuperPod",
        "A SuperPod is a machine of hundreds of accelerator chips on one fast fabric, "
        "so that any die can read the memory of any other.",
    ),
    Term(
        "a die",
        "A die is one accelerator with its own memory and streams. A chip carries two of them.",
    ),
    Term(
        "a DP group",
        "A DP group is a whole serving stack of its own: scheduler, cache, executor and output. "
        "It advances its requests without asking a coordinator.",
    ),
    Term(
        "a DP domain",
        "A DP domain is a set of DP groups that use the expert dies in turn with other domains, "
        "so that one computes attention while another has its experts computed.",
    ),
    Term(
        "an expert die",
        "An expert die holds the weights of a few experts and computes the rows that attention "
        "dies send to it. It keeps no state of any request.",
    ),
    Term(
        "an attention die",
        "An attention die computes attention, keeps the KV cache of its requests and sends rows to "
        "the expert dies.",
    ),
    Term(
        "a trampoline",
        "A trampoline is an expert die that takes the rows of one attention die and forwards them "
        "to the other expert dies, so that nobody has to talk to everybody.",
    ),
    Term(
        "the gateway",
        "The gateway is the door of the pod: it speaks the OpenAI API, limits and admits requests "
        "and streams their tokens back.",
    ),
    Term(
        "the job executor",
        "The job executor chooses a prefill TE by cache hits, load and length, and then a decode "
        "TE by load.",
    ),
    Term(
        "the control plane",
        "The control plane knows who is alive, decides what to do after a failure and never "
        "touches a token.",
    ),
    Term(
        "the TE-shell",
        "The TE-shell dispatches each request once, starts expert rebalancing and passes health "
        "checks on. It never sees a token.",
    ),
    Term(
        "a prefill TE",
        "A prefill TE computes the KV cache of whole prompts and keeps it until a decode TE has "
        "pulled it.",
    ),
    Term(
        "a decode TE",
        "A decode TE pulls the KV cache of a prompt and then makes one token after another for "
        "many requests at once.",
    ),
    Term(
        "DistFlow",
        "DistFlow moves KV cache from prefill to decode. The receiver pulls, and the sender keeps "
        "its blocks until the transfer is complete.",
    ),
    Term(
        "XCCL",
        "XCCL is the communication library: it sends, dispatches and combines by writing into the "
        "memory of other dies.",
    ),
    Term("UB", "UB is the fabric between the dies: remote reads and writes at memory speed."),
    Term(
        "A2E",
        "A2E carries rows from the attention dies to the dies of the experts that they chose.",
    ),
    Term(
        "E2A",
        "E2A brings the weighted outputs of the experts back to the attention die that asked.",
    ),
    Term(
        "dispatch",
        "Dispatch sends every row to the dies of its chosen experts, in INT8 to save bytes.",
    ),
    Term("combine", "Combine gathers the outputs of the chosen experts and adds them by weight."),
    Term(
        "a mixture of experts",
        "A mixture of experts is a layer of many small networks of which a router picks a few for "
        "every token.",
    ),
    Term(
        "the router",
        "The router scores all experts for a token and picks the best few, with a bias that keeps "
        "their load even.",
    ),
    Term(
        "a shared expert",
        "A shared expert is one that every token visits, whatever the router says.",
    ),
    Term(
        "a redundant expert",
        "A redundant expert is a second copy of a busy expert on another die, so that two dies "
        "share its load.",
    ),
    Term(
        "EPLB",
        "EPLB counts the tokens of each expert, copies the hottest ones and places the copies on "
        "the least busy dies.",
    ),
    Term(
        "MLA",
        "MLA is attention that caches one short latent row per token instead of keys and values "
        "for every head.",
    ),
    Term(
        "the KV cache",
        "The KV cache holds what attention has to remember of the earlier tokens of a request.",
    ),
    Term(
        "the prefix cache",
        "The prefix cache keeps KV blocks of earlier prompts, so that a prompt that begins alike "
        "need not be computed again.",
    ),
    Term(
        "MTP",
        "MTP predicts the token after the next one, so that a single pass can commit two tokens "
        "when the guess is right.",
    ),
    Term(
        "a microbatch",
        "A microbatch is a part of the batch, cut so that one part computes while another is on "
        "the fabric.",
    ),
    Term(
        "a straggler",
        "A straggler is the slowest member of a group. At a barrier all the others wait for it.",
    ),
    Term("TTFT", "TTFT is the time to the first token: queueing, prefill and KV transfer."),
    Term("TPOT", "TPOT is the time per output token after the first one."),
    Term(
        "INT8",
        "INT8 stores weights and rows as bytes with a scale; integer sums are exact in any order.",
    ),
    Term(
        "a heartbeat",
        "A heartbeat is a reply that comes out of the same loop that does the work, so a stuck "
        "loop falls silent.",
    ),
    Term(
        "a link probe",
        "A link probe is a small message on the path of the KV cache. A late one means a busy "
        "link, a lost one a broken link.",
    ),
    Term(
        "token recompute",
        "Token recompute rolls every DP group back by one iteration after a glitch of the network "
        "and does the iteration again.",
    ),
    Term(
        "vertical scale-down",
        "Vertical scale-down goes on with fewer dies after a failure, as long as every expert has "
        "a replica left.",
    ),
    Term(
        "kill-P-to-preserve-D",
        "Kill-P-to-preserve-D takes the dies of a prefill TE to bring a failed decode TE back.",
    ),
    Term(
        "request migration",
        "Request migration computes the prompt and the committed tokens again elsewhere. The "
        "client sees one stream without a gap.",
    ),
    Term(
        "a drill",
        "A drill breaks one thing on purpose, checks that the fault was seen, heals it and gives a "
        "verdict.",
    ),
    Term(
        "the fabric emulator",
        "The fabric emulator charges every byte the time that the real fabric would take, and "
        "breaks links on demand.",
    ),
    Term(
        "output shortcutting",
        "Output shortcutting streams tokens straight from the DP group to the gateway, past the "
        "TE-shell.",
    ),
)


@dataclass(frozen=True, slots=True)
class Topic:
    """A question about the system in several wordings, with one answer."""

    questions: tuple[str, ...]
    answer: str


TOPICS = (
    Topic(
        ("What is xDeepServe?", "Tell me about xDeepServe."),
        "xDeepServe serves mixture-of-experts models with prefill, decode, attention and experts "
        "on dies of their own.",
    ),
    Topic(
        ("Why are prefill and decode separate?", "Why split prefill from decode?"),
        "Prefill is long and bound by computing, decode is short and bound by memory. Apart, "
        "neither makes the other wait.",
    ),
    Topic(
        ("Why are attention and experts separate?", "Why split experts from attention?"),
        "Attention grows with the context and keeps state; experts grow with the batch and keep "
        "none. Apart, each gets the dies it needs.",
    ),
    Topic(
        ("What happens when an expert die fails?", "What if an expert die dies?"),
        "Its experts are served by their replicas. Without a replica the pod says so and restores "
        "the expert before it goes on.",
    ),
    Topic(
        ("What happens when a link flaps?", "What if the network hiccups?"),
        "All DP groups roll back by one iteration and compute it again. No token is lost, because "
        "only committed tokens are streamed.",
    ),
    Topic(
        ("What happens when a DP group fails?", "What if a DP group crashes?"),
        "Its requests migrate: another DP group computes prompt and committed tokens again and "
        "goes on with the stream.",
    ),
    Topic(
        ("How do you know that a recovery was right?", "How is a recovery checked?"),
        "The tokens are compared with a single-process reference. They have to be equal.",
    ),
    Topic(
        ("When is a token streamed?", "When does the client see a token?"),
        "A token is streamed after its iteration is committed, so it never has to be taken back.",
    ),
    Topic(
        ("How is a decode DP group chosen?", "Which DP group gets a request?"),
        "Full DP groups are left out, and of the others the one with the least KV cache used and "
        "reserved gets the request.",
    ),
    Topic(
        ("Who starts a KV transfer?", "Does prefill push the KV cache?"),
        "The decode side pulls. When it has no free blocks it waits, and that is the backpressure.",
    ),
)
