"""From text to batches: the corpus folder, the vocabulary, the streams, and the schedule."""

from __future__ import annotations

import hashlib
import json
import lzma
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from libs.errors import BadInput
from libs.model.training import corpus, markup, recipe, streams, tokenizer_trainer
from libs.model.training.dialogues import Prose
from libs.model.training.recipe import Budget

CHAT = corpus.chat_text(300, 0, Prose())
PARAGRAPH = "It is a truth universally acknowledged, that a single man must be in want of a wife."
WINDOW = 32


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    lines = tokenizer_trainer.learnt_lines({"chat": CHAT})
    return tokenizer_trainer.train_tokenizer(lines, vocab_size=600)


@pytest.fixture(scope="module")
def data(tokenizer: Tokenizer) -> streams.Streams:
    return streams.encode_corpus({"novels": PARAGRAPH * 200, "chat": CHAT}, tokenizer)


def ready_texts(folder: Path) -> list[str]:
    (folder / "n.txt").write_text(f"CHAPTER\n{PARAGRAPH}\n")
    (folder / "s.txt.xz").write_bytes(lzma.compress(f"He said, \u201c{PARAGRAPH}\u201d".encode()))
    (folder / "d.txt").write_text("Some docs.\n")
    names = {"novels": "n.txt", "scripture": "s.txt.xz", "docs": "d.txt"}
    return [f"--{domain}={folder / name}" for domain, name in names.items()]


# ---------------------------------------------------------------- corpus


def test_a_corpus_is_built_from_ready_texts_and_says_where_it_comes_from(tmp_path: Path) -> None:
    out = tmp_path / "corpus"
    arguments = [*ready_texts(tmp_path), f"--out={out}", "--dialogues=50", "--seed=3"]
    assert corpus.main(arguments) == 0
    texts = corpus.load(out)
    assert texts["scripture"] == f'He said, "{PARAGRAPH}"'
    assert texts["chat"].count("\n") == 50
    manifest = {entry["domain"]: entry for entry in json.loads((out / "corpus.json").read_text())}
    assert list(manifest) == list(corpus.DOMAINS)
    for domain, text in texts.items():
        assert manifest[domain]["sha256"] == hashlib.sha256(text.encode()).hexdigest()
        assert manifest[domain]["licence"]


def test_the_corpus_is_the_same_for_the_same_seed_and_other_for_another(tmp_path: Path) -> None:
    arguments = [*ready_texts(tmp_path), "--dialogues=20"]
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        corpus.main([*arguments, f"--out={tmp_path / name}", f"--seed={seed}"])
    a, b, c = (corpus.load(tmp_path / name)["chat"] for name in "abc")
    assert a == b != c


def test_only_short_paragraphs_become_passages() -> None:
    assert corpus.passages(f"CHAPTER I\n{PARAGRAPH}\n{'long ' * 200}") == [PARAGRAPH]


@pytest.mark.parametrize("content", [b"\xff\xfe not text", b"\xfd7zXZ broken"])
def test_an_unreadable_text_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.txt.xz"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=r"bad\.txt\.xz"):
        corpus.read_text(path)


def test_a_corpus_without_dialogues_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        corpus.main([*ready_texts(tmp_path), f"--out={tmp_path}", "--dialogues=0"])
    assert caught.value.field == "dialogues"


def test_loading_half_a_corpus_names_the_missing_file(tmp_path: Path) -> None:
    (tmp_path / "novels.txt").write_text("x")
    with pytest.raises(BadInput, match=r"scripture\.txt"):
        corpus.load(tmp_path)


# ---------------------------------------------------------------- vocabulary


@given(st.text(max_size=60))
@settings(max_examples=60)
def test_any_text_survives_encoding(tokenizer: Tokenizer, text: str) -> None:
    if any(token in text for token in markup.SPECIAL_TOKENS):
        return
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens_come_first_and_stay_whole(tokenizer: Tokenizer) -> None:
    for expected, token in enumerate(markup.SPECIAL_TOKENS):
        assert tokenizer.encode(token).ids == [expected]


def test_digits_are_never_merged(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("144").ids) == 3


def test_the_vocabulary_does_not_depend_on_the_run(tokenizer: Tokenizer) -> None:
    lines = tokenizer_trainer.learnt_lines({"chat": CHAT})
    again = tokenizer_trainer.train_tokenizer(lines, vocab_size=600)
    assert again.get_vocab() == tokenizer.get_vocab()


def test_no_merge_is_spent_on_markup() -> None:
    lines = list(tokenizer_trainer.learnt_lines({"chat": CHAT}))
    assert not any(token in line for line in lines for token in markup.SPECIAL_TOKENS)


def test_the_saved_folder_holds_tokenizer_and_template(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    tokenizer_trainer.save_tokenizer(tokenizer, tmp_path)
    loaded = streams.load_tokenizer(tmp_path)
    assert loaded.encode(PARAGRAPH).ids == tokenizer.encode(PARAGRAPH).ids
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["chat_template"] == markup.CHAT_TEMPLATE


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no tokenizer\.json"):
        streams.load_tokenizer(tmp_path)


# ---------------------------------------------------------------- streams


def test_the_end_of_each_stream_is_held_out(data: streams.Streams, tokenizer: Tokenizer) -> None:
    encoded = [i for line in CHAT.splitlines() for i in tokenizer.encode(line).ids]
    assert [*data.train["chat"], *data.held_out["chat"]] == encoded
    share = len(data.held_out["chat"]) / len(encoded)
    assert share == pytest.approx(streams.HELD_OUT_SHARE, rel=0.01)


def test_batches_are_the_same_for_the_same_seed(data: streams.Streams) -> None:
    one, same, other = (streams.Batches(data, WINDOW, seed) for seed in (4, 4, 5))
    first = one.draw(8)
    assert np.array_equal(first, same.draw(8))
    assert not np.array_equal(first, other.draw(8))


def test_a_restored_state_goes_on_with_the_same_batches(data: streams.Streams) -> None:
    batches = streams.Batches(data, WINDOW, seed=1)
    batches.draw(3)
    state = batches.state()
    expected = batches.draw(5)
    resumed = streams.Batches(data, WINDOW, seed=99)
    resumed.restore(state)
    assert np.array_equal(resumed.draw(5), expected)


def test_chat_rows_start_with_a_dialogue_and_domains_mix_by_weight(data: streams.Streams) -> None:
    rows = streams.Batches(data, WINDOW, seed=0).draw(800)
    prose = np.array(data.train["novels"])
    assert markup.BOS_ID not in prose
    with_dialogue = (rows == markup.BOS_ID).any(axis=1)
    assert (rows[with_dialogue, 0] == markup.BOS_ID).all()
    weights = streams.DOMAIN_WEIGHTS
    expected = weights["chat"] / (weights["chat"] + weights["novels"])
    assert with_dialogue.mean() == pytest.approx(expected, abs=0.06)


def test_a_domain_shorter_than_a_window_is_named(tokenizer: Tokenizer) -> None:
    short = streams.encode_corpus({"novels": PARAGRAPH, "chat": CHAT}, tokenizer)
    with pytest.raises(BadInput) as caught:
        streams.Batches(short, 500, seed=0)
    assert caught.value.field == "novels"


def test_held_out_windows_are_spread_over_the_stream() -> None:
    windows = streams.held_out_windows(np.arange(100, dtype=np.uint16), rows=3, window=10)
    assert windows[:, 0].tolist() == [0, 45, 90]
    assert windows.shape == (3, 10)
    with pytest.raises(BadInput, match="shorter than one window"):
        streams.held_out_windows(np.arange(5, dtype=np.uint16), rows=1, window=10)


# ---------------------------------------------------------------- schedule


def test_the_rate_warms_up_stays_flat_and_falls_to_its_floor() -> None:
    late = recipe.WARM_UP_STEPS
    assert recipe.lr_scale(0.0, 0) == pytest.approx(1 / recipe.WARM_UP_STEPS)
    assert recipe.lr_scale(0.2, late) == 1.0
    falling = [recipe.lr_scale(progress / 100, late) for progress in range(35, 101)]
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] == recipe.LR_FLOOR


def test_router_biases_are_frozen_for_the_last_part() -> None:
    assert [recipe.bias_scale(progress) for progress in (0.0, 0.5, 0.9)] == [1.0, 0.25, 0.0]


def test_progress_counts_steps_or_seconds_but_not_both() -> None:
    assert Budget(steps=10).progress(5, elapsed_s=999.0) == 0.5
    assert Budget(seconds=60.0).progress(5, elapsed_s=15.0) == 0.25


@pytest.mark.parametrize(("steps", "seconds"), [(0, 0.0), (5, 60.0), (-1, 0.0), (0, -1.0)])
def test_a_senseless_budget_is_refused(steps: int, seconds: float) -> None:
    with pytest.raises(BadInput, match="either --steps or --minutes"):
        Budget(steps, seconds)


def test_the_model_of_the_recipe_is_the_shipped_one() -> None:
    from libs.model.weights import SHIPPED

    assert json.loads((SHIPPED / "config.json").read_text()) == recipe.MODEL_CONFIG
