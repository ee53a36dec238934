"""Whole answers: what clients of both endpoints get back."""

from __future__ import annotations

from dataclasses import replace

from libs.config.topology import LimitsSection
from libs.model.sampling import derive_seed
from libs.wire.request import RequestSpec
from libs.wire.tokens import Chunk, RequestTiming
from tests.unit.gateway.fake_pod import (
    EOS,
    MODEL,
    TOKENIZER,
    chunks_of,
    gateway,
    saying,
)

CONTROL = TOKENIZER.control
TOOL = {"type": "function", "function": {"name": "get_weather"}}


def calling(spec: RequestSpec) -> list[Chunk]:
    """A tool call, as the model writes it."""
    ids = [
        CONTROL.tool_calls_open,
        CONTROL.tool_call_open,
        *TOKENIZER.encode("get_weather"),
        CONTROL.tool_separator,
        *TOKENIZER.encode('{"city": "Oslo"}'),
        CONTROL.tool_call_close,
        CONTROL.tool_calls_close,
        EOS,
    ]
    return chunks_of(spec, ids, "stop")


async def test_a_conversation_gets_an_openai_answer_with_thought_text_and_usage() -> None:
    async with gateway() as running:
        status, body, _ = await running.chat()
    spec = running.pod.submitted[0]
    prompt = MODEL.template.render([{"role": "user", "content": "Hi"}], thinking=True)
    assert status == 200
    assert body["object"] == "chat.completion"
    assert body["id"] == spec.request_id
    assert body["id"].startswith("chatcmpl-")
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Paris.",
        "refusal": None,
        "reasoning_content": "Hmm, well.",
    }
    assert body["choices"][0]["finish_reason"] == "stop"
    thought = len(TOKENIZER.encode("Hmm, well.")) + 1
    tokens = thought + len(TOKENIZER.encode("Paris.")) + 1
    assert body["usage"] == {
        "prompt_tokens": len(prompt.ids),
        "completion_tokens": tokens,
        "total_tokens": len(prompt.ids) + tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": thought},
    }


async def test_the_answer_says_who_served_it_and_where_its_emulated_time_went() -> None:
    async with gateway() as running:
        _, body, _ = await running.complete()
    gaps = body["usage"]["completion_tokens"] - 1
    assert body["xds"] == {
        "request_id": body["id"],
        "prefill_te": "p0",
        "prefill_dp": "prefill_te.p0.dp0",
        "decode_te": "d0",
        "decode_dp": "decode_te.d0.dp1",
        "expert_dies": [10, 11],
        "kv_bytes": 4096,
        "emulated_ms": {
            "queue": 100.0,
            "prefill": 700.0,
            "kv_transfer": 50.0,
            "first_token": 900.0,
            "per_token": 40.0,
            "total": 900.0 + 40.0 * gaps,
        },
    }


async def test_a_single_token_has_no_time_per_token() -> None:
    async with gateway(saying("a", finish="length")) as running:
        _, body, _ = await running.complete(max_tokens=1)
    assert body["usage"]["completion_tokens"] == 1
    assert body["xds"]["emulated_ms"]["per_token"] is None


async def test_an_answer_that_prefill_ended_was_never_transferred() -> None:
    def script(spec: RequestSpec) -> list[Chunk]:
        (chunk,) = chunks_of(spec, [EOS], "stop")
        assert chunk.timing is not None
        return [replace(chunk, timing=RequestTiming(chunk.timing.prefill))]

    async with gateway(script) as running:
        _, body, _ = await running.complete()
    assert body["choices"][0]["text"] == ""
    assert (body["xds"]["decode_te"], body["xds"]["decode_dp"]) == (None, None)
    assert body["xds"]["emulated_ms"]["kv_transfer"] is None
    assert body["xds"]["emulated_ms"]["first_token"] == body["xds"]["emulated_ms"]["total"]


async def test_what_the_client_asks_for_reaches_the_pod() -> None:
    async with gateway() as running:
        status, _, _ = await running.chat(
            max_completion_tokens=33, temperature=0.5, top_p=0.9, top_k=20, seed=7, stop=["END"],
            presence_penalty=0.1, frequency_penalty=0.2, repetition_penalty=1.1, min_tokens=2,
            ignore_eos=True, logit_bias={"70": -3, "5": 2.5}, stop_token_ids=[9],
        )  # fmt: skip
    assert status == 200
    spec, sampling = running.pod.submitted[0], running.pod.submitted[0].sampling
    assert (spec.max_tokens, spec.output.stops, spec.output.raw) == (33, ("END",), False)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (
        0.5, 0.9, 20, 7,
    )  # fmt: skip
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 0.2)
    assert (sampling.repetition_penalty, sampling.min_tokens, sampling.ignore_eos) == (1.1, 2, True)
    assert sampling.logit_bias == ((5, 2.5), (70, -3.0))
    assert sampling.stop_token_ids == (EOS, 9)


async def test_defaults_are_openais_with_a_seed_of_ours_and_the_topologys_length() -> None:
    async with gateway() as running:
        _, body, _ = await running.complete()
    spec = running.pod.submitted[0]
    assert spec.sampling.seed == derive_seed(body["id"])
    assert (spec.sampling.temperature, spec.sampling.logprobs, spec.max_tokens) == (1.0, -1, 256)
    assert spec.sampling.stop_token_ids == (EOS,)
    assert spec.prompt_ids.tolist() == [CONTROL.bos, *TOKENIZER.encode("Once upon a time")]
    assert spec.prompt_ids.dtype == "int32"


async def test_the_default_length_shrinks_to_the_room_the_prompt_leaves() -> None:
    limits = LimitsSection().model_copy(update={"context_max_tokens": 100, "prompt_max_tokens": 90})
    async with gateway(limits=limits) as running:
        await running.complete(prompt=[5] * 80)
    assert running.pod.submitted[0].max_tokens == 20


async def test_thinking_can_be_switched_off_in_either_way() -> None:
    async with gateway() as running:
        await running.chat(reasoning_effort="none")
        await running.chat(chat_template_kwargs={"thinking": False})
        await running.chat(reasoning_effort="none", chat_template_kwargs={"thinking": True})
    thinks = [spec.output.reasoning_open for spec in running.pod.submitted]
    assert thinks == [False, False, True]


async def test_tool_calls_come_as_openai_calls_with_null_content() -> None:
    async with gateway(calling) as running:
        _, body, _ = await running.chat(tools=[TOOL], chat_template_kwargs={"thinking": False})
    choice = body["choices"][0]
    call = choice["message"]["tool_calls"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert call["id"].startswith("call_")
    assert call["type"] == "function"
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}


async def test_tool_choice_none_keeps_the_model_from_calling_tools_it_knows_by_heart() -> None:
    async with gateway() as running:
        await running.chat(tools=[TOOL], tool_choice="none", logit_bias={"9": 1})
        await running.chat(tools=[TOOL], tool_choice="auto")
    forbidden, free = (dict(spec.sampling.logit_bias) for spec in running.pod.submitted)
    assert forbidden[CONTROL.tool_calls_open] == -100
    assert forbidden[CONTROL.tool_call_open] == -100
    assert forbidden[9] == 1
    assert free == {}


async def test_n_choices_share_prompt_and_seed_and_differ_by_their_number() -> None:
    async with gateway() as running:
        _, body, _ = await running.complete(n=3)
    specs = running.pod.submitted
    assert [spec.request_id for spec in specs] == [
        body["id"], f"{body['id']}.1", f"{body['id']}.2",
    ]  # fmt: skip
    assert [spec.choice for spec in specs] == [0, 1, 2]
    assert len({spec.sampling.seed for spec in specs}) == 1
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in body["choices"]] == ["Paris."] * 3
    assert [choice["xds"]["request_id"] for choice in body["choices"]] == [
        spec.request_id for spec in specs
    ]
    tokens = len(TOKENIZER.encode("Paris.")) + 1
    assert body["usage"]["prompt_tokens"] == specs[0].prompt_tokens
    assert body["usage"]["completion_tokens"] == 3 * tokens


async def test_several_prompts_are_answered_in_order_each_counted_once() -> None:
    async with gateway() as running:
        _, body, _ = await running.complete(prompt=["One", "Two"], n=2)
    specs = running.pod.submitted
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [spec.choice for spec in specs] == [0, 1, 0, 1]
    assert specs[0].prompt_ids.tolist() == [CONTROL.bos, *TOKENIZER.encode("One")]
    assert specs[2].prompt_ids.tolist() == [CONTROL.bos, *TOKENIZER.encode("Two")]
    assert specs[0].sampling.seed == specs[1].sampling.seed != specs[2].sampling.seed
    assert body["usage"]["prompt_tokens"] == specs[0].prompt_tokens + specs[2].prompt_tokens


async def test_token_ids_are_taken_as_they_are_alone_or_in_lists() -> None:
    async with gateway() as running:
        await running.complete(prompt=[5, 6, 7])
        await running.complete(prompt=[[8, 9], [10]])
    assert [spec.prompt_ids.tolist() for spec in running.pod.submitted] == [
        [5, 6, 7], [8, 9], [10],
    ]  # fmt: skip


async def test_chat_logprobs_name_bytes_and_alternatives_of_every_token() -> None:
    async with gateway(saying("né")) as running:
        _, body, _ = await running.chat(
            logprobs=True, top_logprobs=2, chat_template_kwargs={"thinking": False}
        )
    entries = body["choices"][0]["logprobs"]["content"]
    assert len(entries) == body["usage"]["completion_tokens"]
    assert b"".join(bytes(e["bytes"] or []) for e in entries) == "né".encode()
    assert entries[-1]["token"] == TOKENIZER.eos
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * len(entries)
    assert entries[0]["logprob"] == -0.5
    assert running.pod.submitted[0].sampling.logprobs == 2


async def test_completion_logprobs_are_parallel_arrays_with_offsets() -> None:
    async with gateway(saying("one two")) as running:
        _, body, _ = await running.complete(logprobs=1)
    choice = body["choices"][0]
    logprobs = choice["logprobs"]
    ids = [*TOKENIZER.encode("one two"), EOS]
    assert logprobs["tokens"] == [TOKENIZER.token_text(token) for token in ids]
    assert logprobs["token_logprobs"] == [-0.5] * len(ids)
    assert all(
        token in top
        for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
    )
    starts = [len(TOKENIZER.decode(ids[:i])) for i in range(len(ids))]
    assert logprobs["text_offset"] == starts


async def test_half_characters_are_named_by_their_bytes_in_completion_logprobs() -> None:
    async with gateway(saying("😀")) as running:
        _, body, _ = await running.complete(logprobs=0)
    names = body["choices"][0]["logprobs"]["tokens"]
    assert names[0].startswith("bytes:\\x")
    assert body["choices"][0]["text"] == "😀"


async def test_without_logprobs_the_field_is_null() -> None:
    async with gateway() as running:
        _, body, _ = await running.chat()
    assert body["choices"][0]["logprobs"] is None


async def test_token_ids_are_returned_on_request() -> None:
    async with gateway() as running:
        _, chat, _ = await running.chat(return_token_ids=True)
        _, plain, _ = await running.complete(return_token_ids=True)
        _, without, _ = await running.complete()
    prompts = [spec.prompt_ids.tolist() for spec in running.pod.submitted]
    assert chat["prompt_token_ids"] == prompts[0]
    assert len(chat["choices"][0]["token_ids"]) == chat["usage"]["completion_tokens"]
    assert plain["choices"][0]["prompt_token_ids"] == prompts[1]
    assert plain["choices"][0]["token_ids"] == [*TOKENIZER.encode("Paris."), EOS]
    assert "token_ids" not in without["choices"][0]


async def test_fields_that_change_nothing_are_ignored() -> None:
    async with gateway() as running:
        status, _, _ = await running.chat(
            user="u", metadata={"a": "b"}, store=False, service_tier="auto", from_tomorrow=[1],
            response_format={"type": "text"}, modalities=["text"], min_p=0, tool_choice="none",
        )  # fmt: skip
    assert status == 200
