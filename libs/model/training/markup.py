"""The strings around which a conversation is built, in the order of their token ids.

They are DeepSeek's own (V3.1 convention): a parser made for a real checkpoint works on ours.

    prompt        <BOS>{system}<User>{question}<Assistant><think>      or  ...<Assistant></think>
    answer        {thought}</think>{answer}<EOS>
    tool call     {thought}</think><calls><call>{name}<sep>{json}</call></calls><EOS>
    tool result   <output>{json}</output></think>{answer}<EOS>
"""

from __future__ import annotations

PAD = "<｜pad｜>"
BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
THINK_END = "</think>"
CALLS = "<｜tool▁calls▁begin｜>"
CALL = "<｜tool▁call▁begin｜>"
SEP = "<｜tool▁sep｜>"
CALL_END = "<｜tool▁call▁end｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
OUTPUT = "<｜tool▁output▁begin｜>"
OUTPUT_END = "<｜tool▁output▁end｜>"
OUTPUTS = "<｜tool▁outputs▁begin｜>"
OUTPUTS_END = "<｜tool▁outputs▁end｜>"

# The position is the token id; a checkpoint depends on it, so this order never changes.
SPECIAL_TOKENS = (
    PAD, BOS, EOS, USER, ASSISTANT, THINK, THINK_END,
    CALLS, CALL, SEP, CALL_END, CALLS_END, OUTPUT, OUTPUT_END, OUTPUTS, OUTPUTS_END,
)  # fmt: skip
PAD_ID = SPECIAL_TOKENS.index(PAD)
BOS_ID = SPECIAL_TOKENS.index(BOS)
EOS_ID = SPECIAL_TOKENS.index(EOS)

_HISTORY_TURN = (
    "{% if not loop.first and messages[loop.index0-1].role != 'tool' %}"
    + ASSISTANT + THINK_END
    + "{% endif %}"
    "{% if m.tool_calls %}" + CALLS + "{% for t in m.tool_calls %}"
    + CALL + "{{ t.function.name }}" + SEP + "{{ t.function.arguments }}" + CALL_END
    + "{% endfor %}" + CALLS_END + "{% endif %}"
    "{{ m.content or '' }}" + EOS
)  # fmt: skip

# Thoughts of earlier turns are not shown again; after a tool result the model answers at once.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}" + USER + "{{ m.content }}"
    "{% elif m.role == 'assistant' %}" + _HISTORY_TURN
    + "{% elif m.role == 'tool' %}" + OUTPUT + "{{ m.content }}" + OUTPUT_END + THINK_END
    + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role == 'user' %}" + ASSISTANT
    + "{{ '" + THINK + "' if thinking else '" + THINK_END + "' }}{% endif %}"
)  # fmt: skip
