"""The trainer learns, repeats itself, and writes what the serving runtime reads.

Needs torch (the train extra). With XDS_REQUIRE_ORACLE=1 a missing torch is a failure, not a skip.
"""

# torch is an optional extra; a type checker that does not find it takes it for Any.
# mypy: allow-untyped-decorators

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

if os.environ.get("XDS_REQUIRE_ORACLE") != "1":
    pytest.importorskip("torch", reason="training needs torch: pip install 'xdeepserve[train]'")

import torch

from libs.errors import BadInput
from libs.model.engine import Engine
from libs.model.kv import Span
from libs.model.training import acceptance, corpus, evaluate, export, recipe, streams, tasks, train
from libs.model.training import train_mtp2 as second
from libs.model.training.dialogues import Prose
from libs.model.training.layers import Moe
from libs.model.training.network import Network
from libs.model.training.optim import orthogonalised, split_parameters
from libs.model.training.recipe import Budget, Recipe
from libs.model.weights import SHIPPED, load_checkpoint

pytestmark = pytest.mark.train

SMALL = Recipe(sequences=2, window=48)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    train.set_up_torch(threads=1)


@pytest.fixture(scope="module")
def data() -> streams.Streams:
    return train.smoke_streams(seed=0)


@pytest.fixture(scope="module")
def shipped() -> Network:
    network = export.load_network()
    network.eval()
    return network


@pytest.fixture(scope="module")
def prompt(shipped: Network) -> list[int]:
    tokenizer = streams.load_tokenizer(SHIPPED)
    [task, *_] = tasks.make_tasks("capital", 1, seed=0)
    return tokenizer.encode(task.prompt).ids


def steps(data: streams.Streams, count: int, seed: int = 0) -> train.Trainer:
    trainer = train.Trainer(data, replace(SMALL, seed=seed))
    for _ in train.learn(trainer, Budget(steps=count)):
        pass
    return trainer


def same_weights(one: Network, other: Network) -> bool:
    others = other.state_dict()
    return all(torch.equal(value, others[name]) for name, value in one.state_dict().items())


# ---------------------------------------------------------------- training


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sixty_steps_on_generated_chat_bring_the_loss_below_three(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train.main(["--smoke"]) == 0
    lines = capsys.readouterr().out.splitlines()
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines if "step" in line]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > 6 > train.SMOKE_LOSS > losses[-1]


def test_the_same_seed_and_steps_give_the_same_weights(data: streams.Streams) -> None:
    one, again, other = steps(data, 3), steps(data, 3), steps(data, 3, seed=1)
    assert same_weights(one.network, again.network)
    assert not same_weights(one.network, other.network)


def test_a_resumed_run_ends_as_if_it_had_not_stopped(data: streams.Streams, tmp_path: Path) -> None:
    whole = steps(data, 4)
    budget = Budget(steps=4)
    stopped = train.Trainer(data, SMALL)
    for report in train.learn(stopped, budget):
        if report.step == 2:
            break
    train.save_state(stopped, tmp_path, elapsed_s=12.5)
    resumed = train.Trainer(data, SMALL)
    saved = torch.load(tmp_path / train.STATE_FILE, weights_only=True)
    assert resumed.restore(saved) == 12.5
    for _ in train.learn(resumed, budget):
        pass
    assert same_weights(whole.network, resumed.network)


def test_balancing_raises_the_bias_of_idle_experts(data: streams.Streams) -> None:
    trainer = steps(data, 1)
    for moe in trainer.network.moes().values():
        bias, load = moe.gate.e_score_correction_bias, moe.load
        assert bias[load.argmin()] > 0 > bias[load.argmax()]


def test_every_parameter_has_one_optimiser_and_learns(data: streams.Streams) -> None:
    trainer = train.Trainer(data, SMALL)
    before = {name: value.clone() for name, value in trainer.network.named_parameters()}
    inner, other = split_parameters(trainer.network)
    assert len(inner) + len(other) == len(before)
    trainer.step(progress=0.0)
    frozen = [n for n, p in trainer.network.named_parameters() if torch.equal(p, before[n])]
    assert frozen == []


@pytest.mark.parametrize("shape", [(3, 16, 64), (3, 64, 16)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape: tuple[int, ...]) -> None:
    stack = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalised(stack))
    assert 0.6 < values.min() <= values.max() < 1.3


def test_stacked_experts_equal_a_loop_over_tokens() -> None:
    torch.manual_seed(0)
    moe = Moe(recipe.MODEL_ARGS).eval()
    x = torch.randn(1, 9, recipe.MODEL_ARGS.hidden_size)
    chosen, weights = moe.gate(x[0])
    expected = moe.shared_experts(x)[0].clone()
    for token in range(9):
        for expert, weight in zip(chosen[token], weights[token], strict=True):
            gate, up = (moe.experts.gate_up[expert] @ x[0, token]).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            expected[token] += weight * (moe.experts.down[expert] @ inner)
    assert torch.allclose(moe(x)[0], expected, atol=1e-5)
    assert int(moe.load.sum()) == 9 * recipe.MODEL_ARGS.num_experts_per_tok


# ---------------------------------------------------------------- checkpoints


def test_an_exported_network_comes_back_in_bfloat16(data: streams.Streams, tmp_path: Path) -> None:
    network = steps(data, 2).network
    checkpoint = export.save_checkpoint(network, tmp_path, recipe.MODEL_CONFIG)
    assert checkpoint.args == recipe.MODEL_ARGS
    restored = export.load_network(tmp_path).state_dict()
    for name, value in network.state_dict().items():
        kept = value if "mlp.gate." in name else value.bfloat16().float()
        assert torch.equal(restored[name], kept), name


def test_the_shipped_files_survive_a_round_trip(shipped: Network, tmp_path: Path) -> None:
    config = json.loads((SHIPPED / "config.json").read_text())
    again = export.save_checkpoint(shipped, tmp_path, config)
    original = load_checkpoint()
    assert set(again.stored) == set(original.stored)
    for name in original.stored:
        assert again.stored[name].dtype == original.stored[name].dtype
        assert np.array_equal(again.tensor(name), original.tensor(name)), name


def test_a_new_main_file_does_not_keep_an_old_second_layer(
    data: streams.Streams, tmp_path: Path
) -> None:
    (tmp_path / export.SECOND_MTP_FILE).write_bytes(b"of another model")
    checkpoint = export.save_checkpoint(steps(data, 1).network, tmp_path, recipe.MODEL_CONFIG)
    assert checkpoint.args.num_nextn_predict_layers == 1


@torch.no_grad()
def test_the_network_agrees_with_the_serving_runtime(shipped: Network, prompt: list[int]) -> None:
    engine = Engine(load_checkpoint(), mode="f32")
    kv = engine.contiguous_kv()
    count = len(prompt) - 2
    spans = [Span(0, 0, count)]
    logits, hidden = engine.forward(prompt[:count], spans, kv)
    draft, draft_hidden = engine.mtp_forward(0, hidden, prompt[1:-1], spans, kv)
    draft2, _ = engine.mtp_forward(1, draft_hidden, prompt[2:], spans, kv)

    tokens = torch.tensor([prompt])
    ours = shipped.hidden(tokens[:, :count])
    first = shipped.mtp_hidden(0, ours, tokens[:, 1:-1])
    other = shipped.mtp_hidden(1, first, tokens[:, 2:])
    for theirs, rows in ((logits, ours), (draft, first), (draft2, other)):
        assert np.abs(shipped.lm_head(rows)[0].numpy() - theirs).max() < 1e-3


@torch.no_grad()
def test_a_reused_draft_sees_the_main_models_rows(shipped: Network, prompt: list[int]) -> None:
    # With the true hidden rows in place of the recycled ones, and positions to match, a second run
    # of the layer is one more step of the first: same past, so the same last row.
    tokens = torch.tensor([prompt])
    hidden = shipped.hidden(tokens)
    plain = shipped.mtp_hidden(0, hidden[:, :-1], tokens[:, 1:])
    reused = shipped.mtp_reused(hidden[:, :-2], hidden[:, 1:-1], tokens)
    assert torch.allclose(reused, plain[:, 1:], atol=1e-4)


def test_unsupported_variants_are_refused_by_field() -> None:
    with pytest.raises(BadInput) as caught:
        Network(replace(recipe.MODEL_ARGS, q_lora_rank=None))
    assert caught.value.field == "q_lora_rank"


# ---------------------------------------------------------------- second MTP layer


def test_only_the_second_mtp_layer_learns(
    data: streams.Streams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(second, "SEQUENCES", 2)
    main = steps(data, 1).network
    grown = second.with_second_layer(main)
    batches = streams.Batches(data, second.WINDOW + 3, seed=0)
    reports = list(second.learn(grown, batches, Budget(steps=12)))
    assert reports[-1].loss < reports[0].loss
    weights = grown.state_dict()
    parameters = dict(main.named_parameters())
    assert all(torch.equal(weights[name], value) for name, value in parameters.items())
    first, added = grown.mtp_layer(0), grown.mtp_layer(1)
    assert not torch.equal(first.eh_proj.weight, added.eh_proj.weight)
    export.save_checkpoint(grown, tmp_path, recipe.MODEL_CONFIG)
    assert (tmp_path / export.SECOND_MTP_FILE).is_file()
    assert load_checkpoint(tmp_path).args.num_nextn_predict_layers == 2


# ---------------------------------------------------------------- judging


def test_tokens_per_step_walks_over_accepted_drafts() -> None:
    first = np.array([[True, False, True, True, False]])
    second_draft = np.array([[False, True, True, False, True]])
    # rows 0 (2 tokens), 2 (3 tokens): five tokens in two steps
    assert acceptance.tokens_per_step(first, second_draft, start=0) == 2.5
    assert acceptance.tokens_per_step(first, np.zeros_like(first), start=0) == pytest.approx(5 / 3)


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("It is 4.</think>The answer is 14.", True),
        ("It is 14.</think>The answer is 4.", False),
        ("x</think>The answer is 144.", False),
        ("14", True),
    ],
)
def test_only_the_visible_whole_answer_counts(completion: str, right: bool) -> None:
    assert tasks.is_right(tasks.Task("arithmetic", "", "14"), completion) is right


def test_the_shipped_model_calls_tools_and_knows_capitals(shipped: Network) -> None:
    tokenizer = streams.load_tokenizer(SHIPPED)
    asked = [task for kind in ("capital", "weather") for task in tasks.make_tasks(kind, 4, seed=7)]
    accuracy = tasks.accuracy(shipped, tokenizer, asked)
    assert set(accuracy) == {"capital", "weather call", "weather result"}
    assert min(accuracy.values()) >= 0.75


def test_figures_of_the_shipped_model_are_complete_and_sane(
    shipped: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance, "NEW_TOKENS", 12)
    monkeypatch.setattr(tasks, "KINDS", ("opposite",))
    text = corpus.chat_text(400, 9, Prose())
    tokenizer = streams.load_tokenizer(SHIPPED)
    chat = streams.encode_corpus({"chat": text}, tokenizer)
    figures = evaluate.evaluate(shipped, chat, tokenizer, rows=2)
    evaluate.show(figures)
    assert 0 < figures["loss"]["chat"]["loss"] < 5
    assert set(figures["skew"]["chat"]) == set(range(1, 7))
    assert all(skew["hottest"] >= 1 >= skew["coldest"] for skew in figures["skew"]["chat"].values())
    drafts = figures["acceptance"]["chat"]
    assert 1 <= drafts["first_tokens"] <= drafts["second_tokens"] <= 3
    json.dumps(figures)
