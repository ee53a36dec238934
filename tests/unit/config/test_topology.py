from __future__ import annotations

from pathlib import Path

import pytest

from libs.config.topology import TOPOLOGY_DIR, load_topology, parse_topology
from libs.errors import BadInput

GOOD = """
name: small
prefill_tes: [{name: p0}]
decode_tes: [{name: d0}]
"""

#: What is wrong: the file, and the lines that must be reported.
BAD_FILES: dict[str, tuple[str, list[str]]] = {
    "unknown key": (
        GOOD + "colour: blue\n",
        ["f.yaml: colour: Extra inputs are not permitted"],
    ),
    "wrong type": (
        GOOD + "gateways: '2'\n",
        ["f.yaml: gateways: Input should be a valid integer"],
    ),
    "nested path": (
        "name: small\nprefill_tes: [{name: p0}]\ndecode_tes: [{name: d0, batch_max: 0}]\n",
        ["f.yaml: decode_tes.0.batch_max: Input should be greater than or equal to 1"],
    ),
    "several problems, one line each": (
        GOOD + "gateways: 0\nprofile: h100\n",
        [
            "f.yaml: profile: Input should be 'deepseek-r1' or 'xds-tiny'",
            "f.yaml: gateways: Input should be greater than or equal to 1",
        ],
    ),
    "an unknown carrier": (
        GOOD + "fabric: {carrier: pigeon}\n",
        ["f.yaml: fabric.carrier: Input should be 'nats' or 'shm'"],
    ),
    "missing part": (
        "name: small\nprefill_tes: [{name: p0}]\n",
        ["f.yaml: decode_tes: Field required"],
    ),
    "no prefill": (
        "name: small\nprefill_tes: []\ndecode_tes: [{name: d0}]\n",
        ["f.yaml: prefill_tes: Tuple should have at least 1 item"],
    ),
    "bad name": (
        "name: Small!\nprefill_tes: [{name: p0}]\ndecode_tes: [{name: d0}]\n",
        ["f.yaml: name: String should match pattern"],
    ),
    "a name used twice": (
        "name: small\nprefill_tes: [{name: x}]\ndecode_tes: [{name: x}]\n",
        ["TE names must be unique, used twice: x"],
    ),
    "a prompt as long as the context": (
        GOOD + "limits: {prompt_max_tokens: 2048}\n",
        ["limits.prompt_max_tokens must be below limits.context_max_tokens"],
    ),
    "a default above its limit": (
        GOOD + "limits: {output_default_tokens: 2000}\n",
        ["limits.output_default_tokens must not exceed limits.output_max_tokens"],
    ),
    "a pool too small for one request": (
        GOOD + "kv: {block_size: 16, decode_blocks: 100}\n",
        ["kv.decode_blocks cannot hold one request of limits.context_max_tokens"],
    ),
    "host memory for a cache that is off": (
        GOOD + "kv: {prefix_cache: false, host_blocks: 8}\n",
        ["kv.host_blocks needs kv.prefix_cache: it holds what that evicts"],
    ),
    "less host memory than none": (
        GOOD + "kv: {host_blocks: -1}\n",
        ["f.yaml: kv.host_blocks: Input should be greater than or equal to 0"],
    ),
    "a switch that is no switch": (
        GOOD + "kv: {prefix_cache: 1}\n",
        ["f.yaml: kv.prefix_cache: Input should be a valid boolean"],
    ),
    "not a mapping": ("- 1\n- 2\n", ["f.yaml: expected a mapping at the top"]),
    "empty": ("", ["f.yaml: expected a mapping at the top"]),
    "not YAML": ("name: [", ["f.yaml: not YAML"]),
    "keys that are not names": ("1: 2\n" + GOOD, ["f.yaml: 1"]),
    "a file that contains itself": (GOOD + "kv: &k {block_size: *k}\n", ["f.yaml: "]),
}


@pytest.mark.parametrize(("text", "expected"), BAD_FILES.values(), ids=BAD_FILES)
def test_every_problem_of_a_bad_file_is_one_line_with_its_path(
    text: str, expected: list[str]
) -> None:
    with pytest.raises(BadInput) as caught:
        parse_topology(text, source="f.yaml")
    for line in expected:
        assert line in caught.value.message
    assert caught.value.field == "f.yaml"


def test_problems_are_reported_together() -> None:
    text, expected = BAD_FILES["several problems, one line each"]
    with pytest.raises(BadInput) as caught:
        parse_topology(text, source="f.yaml")
    assert len(caught.value.message.splitlines()) == len(expected)


def test_a_minimal_file_gets_defaults() -> None:
    topology = parse_topology(GOOD, source="f.yaml")
    assert topology.decode_tes[0].dp_groups == 2
    assert topology.model.engine == "int8"


@pytest.mark.parametrize("path", sorted(TOPOLOGY_DIR.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_topology_is_valid_and_found_by_name(path: Path) -> None:
    assert load_topology(path.stem) == load_topology(str(path))


def test_a_missing_file_is_named_with_what_exists() -> None:
    with pytest.raises(BadInput, match=r"cannot read topology .*shipped ones: .*mini"):
        load_topology("no-such-pod")


def test_a_file_that_is_not_text_is_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "pod.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="not UTF-8"):
        load_topology(str(path))


def test_the_carrier_can_be_said_beside_the_file() -> None:
    assert load_topology("mini").fabric.carrier == "nats"
    assert load_topology("mini", "shm").fabric.carrier == "shm"
    with pytest.raises(BadInput, match="nats or shm, not 'pigeon'") as caught:
        load_topology("mini", "pigeon")
    assert caught.value.field == "carrier"


def test_the_prefix_cache_is_on_and_host_memory_off_unless_the_file_says_otherwise() -> None:
    kv = parse_topology(GOOD, source="f.yaml").kv
    assert (kv.prefix_cache, kv.host_blocks) == (True, 0)
    given = parse_topology(GOOD + "kv: {host_blocks: 64}\n", source="f.yaml").kv
    assert (given.prefix_cache, given.host_blocks) == (True, 64)
