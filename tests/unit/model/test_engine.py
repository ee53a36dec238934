"""The promise of the exact modes: one result per prompt, however the work was cut."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libs.errors import BadInput, CapacityExceeded, InvariantError
from libs.model.engine import Engine, Parts
from libs.model.info import model_info
from libs.model.kv import KvStore, Span
from libs.model.reference import Reference, greedy, logit_hash
from libs.model.weights import load_checkpoint
from tests.unit.model.checkpoints import YARN, random_tokens, shipped, write_checkpoint

EXACT = ["int8", "fx"]
PROMPTS = [random_tokens(20 + 7 * i, seed=i) for i in range(8)]


def chunked(
    engine: Engine, ids: list[int], sizes: list[int], kv: KvStore, sequence: int = 0
) -> np.ndarray:
    """Logits of `ids`, prefilled in chunks whose sizes cycle through `sizes`."""
    rows: list[np.ndarray] = []
    start = 0
    while start < len(ids):
        length = min(sizes[len(rows) % len(sizes)], len(ids) - start)
        span = Span(sequence, start, length)
        rows.append(engine.forward(ids[start : start + length], [span], kv)[0])
        start += length
    return np.concatenate(rows)


@pytest.mark.parametrize("mode", EXACT)
@pytest.mark.parametrize("sizes", [[1], [7], [3, 1, 16], [50, 2]])
def test_chunked_prefill_and_token_by_token_equal_one_pass(mode: str, sizes: list[int]) -> None:
    engine, ids = shipped(mode), random_tokens(60, seed=11)
    whole = Reference(engine).prefill(ids)
    assert chunked(engine, ids, sizes, engine.contiguous_kv()).tobytes() == whole.tobytes()


@pytest.mark.parametrize("mode", EXACT)
@pytest.mark.parametrize("batch", [1, 2, 4, 8])
def test_batched_decode_equals_the_reference(mode: str, batch: int) -> None:
    engine, steps = shipped(mode), 4
    reference = Reference(engine)
    kv = engine.contiguous_kv()
    wanted = [reference.trace(prompt, greedy, steps + 1) for prompt in PROMPTS]
    for sequence, prompt in enumerate(PROMPTS):
        engine.forward(prompt, [Span(sequence, 0, len(prompt))], kv)
    for step in range(steps):
        for first in range(0, 8, batch):
            members = range(first, first + batch)
            tokens = [wanted[s].tokens[step] for s in members]
            spans = [Span(s, len(PROMPTS[s]) + step, 1) for s in members]
            logits, _ = engine.forward(tokens, spans, kv)
            for row, s in zip(logits, members, strict=True):
                assert row.tobytes() == wanted[s].logits[len(PROMPTS[s]) + step].tobytes()


def test_float32_does_depend_on_the_batch() -> None:
    engine = shipped("f32")
    kv = engine.contiguous_kv()
    alone = np.concatenate([Reference(engine).prefill(prompt)[-1:] for prompt in PROMPTS])
    rows = engine.forward(
        [token for prompt in PROMPTS for token in prompt],
        [Span(s, 0, len(prompt)) for s, prompt in enumerate(PROMPTS)],
        kv,
    )[0]
    together = rows[np.cumsum([len(prompt) for prompt in PROMPTS]) - 1]
    assert together.tobytes() != alone.tobytes()
    np.testing.assert_allclose(together, alone, atol=1e-3)


@pytest.mark.parametrize("mode", EXACT)
def test_paged_kv_equals_contiguous_kv(mode: str) -> None:
    engine, ids = shipped(mode), random_tokens(45, seed=3)
    kv = engine.paged_kv(num_blocks=32, block_size=4)
    kv.bind(9, [int(b) for b in np.random.default_rng(0).permutation(32)[:12]])
    paged = chunked(engine, ids, [13, 1], kv, sequence=9)
    assert paged.tobytes() == Reference(engine).prefill(ids).tobytes()


@pytest.mark.parametrize("mode", EXACT)
def test_decode_goes_on_from_transferred_blocks(mode: str) -> None:
    engine, ids = shipped(mode), random_tokens(21, seed=4)
    source, target = engine.paged_kv(8, 8), engine.paged_kv(16, 8)
    source.bind(0, [7, 1, 4])
    target.bind(5, [0, 15, 3])
    engine.forward(ids[:20], [Span(0, 0, 20)], source)
    for old, new in zip([7, 1, 4], [0, 15, 3], strict=True):
        target.import_block(new, source.export_block(old))
    logits, _ = engine.forward(ids[20:], [Span(5, 20, 1)], target)
    assert logits[0].tobytes() == Reference(engine).prefill(ids)[20].tobytes()


@pytest.mark.parametrize("mode", EXACT)
def test_a_lost_kv_cache_is_recomputed_to_the_same_bits(mode: str) -> None:
    engine, rng = shipped(mode), np.random.default_rng(8)
    prompt = random_tokens(30, seed=5)
    wanted = Reference(engine).trace(prompt, greedy, 24)
    history, kv = list(prompt), engine.contiguous_kv()
    last = chunked(engine, history, [9], kv)[-1]
    for step in range(24):
        assert last.tobytes() == wanted.logits[len(prompt) - 1 + step].tobytes()
        history.append(int(last.argmax()))
        if rng.random() < 0.3:
            kv = engine.contiguous_kv()
            last = chunked(engine, history, rng.integers(1, 20, 8).tolist(), kv)[-1]
        else:
            span = Span(0, len(history) - 1, 1)
            last = engine.forward(history[-1:], [span], kv)[0][-1]
    assert tuple(history[30:]) == wanted.tokens


@pytest.mark.parametrize("mode", EXACT)
def test_the_disaggregated_cut_equals_forward(mode: str) -> None:
    """Attention and experts in separate engines, random dies, micro-batches and arrival order."""
    checkpoint, ids = load_checkpoint(), random_tokens(26, seed=6)
    rng = np.random.default_rng(1)
    attention = Engine(checkpoint, mode, Parts(experts={}))
    shares = np.array_split(rng.permutation(17), 4)
    dies = [
        Engine(
            checkpoint,
            mode,
            Parts(attention=False, experts={layer: share.tolist() for layer in range(1, 6)}),
        )
        for share in shares
    ]
    kv = attention.contiguous_kv()
    x = attention.embed(ids)
    for layer in range(attention.args.num_hidden_layers):
        x = attention.attend(layer, x, [Span(0, 0, len(ids))], kv)
        if not attention.is_moe(layer):
            x = attention.dense_mlp(layer, x)
            continue
        halves = []
        for micro in (x[:11], x[11:]):
            routed = attention.gate(layer, micro)
            partials = [
                dies[d].expert_partial(
                    layer, routed.rows, routed.topk_idx, routed.topk_weights, shares[d].tolist()
                )
                for d in rng.permutation(4)
            ]
            halves.append(attention.combine(micro, partials))
        x = np.concatenate(halves)
    assert attention.head(x).tobytes() == Reference(shipped(mode)).prefill(ids).tobytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"q_lora_rank": None},
        {"rope_scaling": YARN},
        {"n_group": 1, "topk_group": 1},
        {"n_shared_experts": 0},
        {"tie_word_embeddings": True},
        {"norm_topk_prob": False, "first_k_dense_replace": 0},
    ],
)
@pytest.mark.parametrize("mode", EXACT)
def test_other_shapes_of_the_family_are_exact_as_well(
    tmp_path: Path, changes: dict[str, Any], mode: str
) -> None:
    engine = Engine(load_checkpoint(write_checkpoint(tmp_path, **changes)), mode)
    ids = random_tokens(33, seed=2, vocab=96)
    whole = Reference(engine).prefill(ids)
    assert np.isfinite(whole).all()
    assert chunked(engine, ids, [5, 1, 11], engine.contiguous_kv()).tobytes() == whole.tobytes()


def test_fixed_point_is_float32_to_a_few_thousandths() -> None:
    ids = random_tokens(64, seed=7)
    fx, f32 = (Reference(shipped(mode)).prefill(ids) for mode in ("fx", "f32"))
    assert np.abs(fx - f32).max() < 0.01
    assert (fx.argmax(-1) == f32.argmax(-1)).all()


def test_int8_agrees_with_float32_on_nearly_every_token() -> None:
    ids = random_tokens(200, seed=7)
    int8, f32 = (Reference(shipped(mode)).prefill(ids) for mode in ("int8", "f32"))
    assert (int8.argmax(-1) == f32.argmax(-1)).mean() > 0.9
    assert int8.tobytes() != f32.tobytes()


def test_generation_keeps_the_stop_token_and_ends_there() -> None:
    reference = Reference(shipped("int8"))
    free = reference.generate(PROMPTS[0], greedy, 6)
    assert len(free) == 6
    stop = free[3]
    assert reference.generate(PROMPTS[0], greedy, 6, {stop}) == free[: free.index(stop) + 1]


def test_choose_sees_position_and_history() -> None:
    seen = []

    def choose(logits: np.ndarray, position: int, history: Sequence[int]) -> int:
        seen.append((position, list(history)))
        return 42

    Reference(shipped("int8")).generate([5, 6], choose, 2)
    assert seen == [(2, [5, 6]), (3, [5, 6, 42])]


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([], BadInput, "no tokens"),
        ([1, 2048], BadInput, "outside"),
        ([1] * 2047, CapacityExceeded, "2048 positions"),
    ],
)
def test_prompts_that_cannot_be_served_are_refused(
    ids: list[int], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Reference(shipped("int8")).generate(ids, greedy, 2)


def test_the_hash_sees_a_single_bit() -> None:
    logits = Reference(shipped("int8")).prefill([1, 2, 3])
    changed = logits.copy()
    changed.view(np.uint32)[1, 77] ^= 1
    assert logit_hash(logits) != logit_hash(changed)
    assert logit_hash(logits) == logit_hash(iter(logits))


def test_an_attention_engine_holds_no_experts() -> None:
    engine = Engine(load_checkpoint(), "int8", Parts(experts={}))
    assert engine.held_experts(3) == ()
    with pytest.raises(InvariantError, match="no dense MLP for layer 3"):
        engine.dense_mlp(3, engine.embed([1]))
    with pytest.raises(InvariantError, match="no experts for layer 0"):
        engine.held_experts(0)


def test_info_counts_every_parameter_once() -> None:
    checkpoint = load_checkpoint()
    info = model_info(checkpoint)
    stored = sum(int(np.prod(t.shape)) for t in checkpoint.stored.values())
    assert info["parameters_total"] == stored
    assert info["parameters"]["routed_experts"] == 5 * 16 * 3 * 128 * 64
    assert info["kv_bytes_per_token"] == 8 * 48 * 4
    assert info["bit_budget"]["max_exact_context"] == 4096
    assert info["layout"]["unused_tensors"] == []
    assert set(info["files"]) == {"model.safetensors", "mtp2.safetensors"}


def test_info_leaves_idle_experts_out_of_the_active_count(tmp_path: Path) -> None:
    dense = model_info(load_checkpoint(write_checkpoint(tmp_path / "all", num_experts_per_tok=4)))
    sparse = model_info(load_checkpoint(write_checkpoint(tmp_path / "few", num_experts_per_tok=2)))
    difference = dense["parameters_active_per_token"] - sparse["parameters_active_per_token"]
    assert difference == 2 * 2 * (3 * 48 * 24)  # two layers, two experts fewer
