"""States: small, and refused in one sentence wherever they are not this stream's."""

from __future__ import annotations

import copy
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.stream.support import (
    PACKINGS,
    documents,
    make,
    taken,
    through_json,
    write_parquet,
)
from tests.text.tokenizers_for_tests import llama3_like

from penstock.errors import ConfigError, PenstockError, StateMismatch
from penstock.stream import TextStream, merge_states, reading
from penstock.text import open_tokenizer

# --- size


def test_a_state_of_240_lanes_is_small_at_any_depth(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", documents(60, empty=0), group=60)
    with make(path, lanes=240) as stream:
        state = stream.state_dict()
        units = 10**7 // 240 * 240
        for lane in range(240):
            state["lanes"][str(lane)] = [10**6, units + lane, 100, 1000]
        assert len(json.dumps(state | {"row": 10**12, "step": 10**9})) < 16 << 10


def test_a_thousand_waiting_documents_take_less_than_64_kib_a_lane(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", documents(6000, empty=0), group=500)
    with make(path, "best_fit_crop", lanes=1, buffer_size=1000, tokenizer_batch_size=128) as stream:
        taken(stream, 1500)
        state = stream.state_dict()
        waiting = sum(len(each) - 3 for each in state["lanes"]["0"][1])
        assert waiting >= 1000 - 1
        assert len(json.dumps(state["lanes"])) < 64 << 10


@pytest.mark.parametrize("packing", PACKINGS)
def test_loading_at_any_depth_reads_what_the_state_names_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str
) -> None:
    path = write_parquet(tmp_path / "a.parquet", documents(400, empty=0), group=10)
    with make(path, packing) as stream:
        taken(stream, 50)
        shallow = through_json(stream.state_dict())
        units = len(stream.corpus.units)
    lap = 6 * 10**6  # epochs: a multiple of the lanes, so that each is at a unit of its own

    def deeper(at: list[Any]) -> list[Any]:
        if isinstance(at[0], list):  # under another key, other documents wait
            return [[at[0][0] + lap, at[0][1], 0], []]
        return [at[0] + lap, at[1], 0]

    deep = shallow | {"lanes": {lane: deeper(at) for lane, at in shallow["lanes"].items()}}
    read: list[Any] = []
    real = reading.Reader._read
    monkeypatch.setattr(
        reading.Reader, "_read", lambda self, unit: (read.append(unit), real(self, unit))[1]
    )
    with make(path, packing) as stream:
        stream.load_state_dict(deep)
        assert read == []
        assert stream.state_dict() == deep
        taken(stream, 6)
    assert 0 < len(read) <= 6 * 12 < units * 2


# --- refusals


def refused(error: type[PenstockError], match: str, call: Any, *args: Any, **options: Any) -> None:
    with pytest.raises(error, match=match) as caught:
        call(*args, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 700


def test_settings_that_cannot_be_meant_are_refused(corpora: dict[str, Path]) -> None:
    path = corpora["jsonl"]
    for options, match in [
        ({"packing": "bfd"}, "packing is one of chunked, concat, best_fit_crop, not 'bfd'"),
        ({"policy": "ignore"}, "policy is 'error' or 'reject', not 'ignore'"),
        ({"seq_len": 0}, "seq_len is a whole number >= 1, not 0"),
        ({"seq_len": 2.5}, "seq_len is a whole number >= 1, not 2.5"),
        ({"batch_size": -1}, "batch_size is a whole number >= 1, not -1"),
        ({"lanes": 0}, "lanes is a whole number >= 1, not 0"),
        ({"lanes": "6"}, "lanes is a whole number >= 1, not '6'"),
        ({"threads": 0}, "threads is a whole number >= 1, not 0"),
        ({"threads": -2}, "threads is a whole number >= 1, not -2"),
        ({"steps": 0}, "steps is a whole number >= 1, not 0"),
        ({"buffer_size": 0}, "buffer_size is a whole number >= 1, not 0"),
        ({"tokenizer_batch_size": 0}, "tokenizer_batch_size is a whole number >= 1, not 0"),
        ({"rank": 2, "world": 2}, r"rank must lie in \[0, 2\)"),
        ({"rank": -1, "world": 2}, r"rank must lie in \[0, 2\)"),
        ({"world": 0}, "rank must lie in"),
        ({"world": 4}, "6 lanes cannot be dealt evenly to 4 ranks: run 1, 2, 3, 6 ranks, or"),
        ({"world": 12}, "6 lanes cannot be dealt evenly to 12 ranks: run 1, 2, 3, 6 ranks, or"),
        ({"lanes": 240, "world": 7}, "run 1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 16, 20, 24, 30, 40"),
        ({"seed": "x"}, "seed is a whole number, not 'x'"),
        ({"device": "cuda"}, "torch finds no CUDA here"),
    ]:
        refused(ConfigError, match, make, path, **options)


def test_a_tokenizer_has_to_tell_documents_apart(corpora: dict[str, Path], tmp_path: Path) -> None:
    path = corpora["jsonl"]
    bare = tmp_path / "bare"
    bare.mkdir()
    content = Path(llama3_like(), "tokenizer.json").read_bytes()
    (bare / "tokenizer.json").write_bytes(content)
    (bare / "tokenizer_config.json").write_text("{}")
    neither = open_tokenizer(bare, backend="reference")
    refused(ConfigError, "names neither eos_token nor bos_token", make, path, tokenizer=neither)
    refused(ConfigError, "names no eos_token", make, path, tokenizer=neither, eos=True)
    refused(ConfigError, "names no bos_token", make, path, tokenizer=bare, bos=True)
    refused(ConfigError, "nothing else would tell", make, path, bos=False, eos=False)
    (bare / "tokenizer_config.json").write_text('{"bos_token": "<|end_of_text|>"}')
    with make(path, tokenizer=bare) as stream:
        assert stream.identity()["framing"] == {"bos": stream.tokenizer.bos_id, "eos": None}


def test_framing_is_what_is_asked_for(corpora: dict[str, Path]) -> None:
    both = open_tokenizer(llama3_like(), backend="reference")
    for options, bos, eos in [
        ({}, False, True),
        ({"bos": True}, True, True),
        ({"eos": False}, True, False),
        ({"bos": True, "eos": True}, True, True),
    ]:
        with make(
            corpora["jsonl"], "concat", tokenizer=both, lanes=1, shuffle=False, **options
        ) as stream:
            tokens = [t for _ in range(20) for t in stream.share.draw(1, "u2")[0][0].tolist()]
        assert (tokens[0] == both.bos_id) == bos
        assert (both.bos_id in tokens) == bos
        assert (both.eos_id in tokens) == eos
        if bos and eos:
            after = [b for a, b in pairwise(tokens) if a == both.eos_id]
            assert set(after) == {both.bos_id}


def test_a_state_of_another_run_is_refused_by_what_differs(corpora: dict[str, Path]) -> None:
    with make(corpora["jsonl"]) as stream:
        taken(stream, 7)
        state = through_json(stream.state_dict())
    for options, name in [
        ({"seed": 4}, "seed was 3 and is 4 here"),
        ({"seq_len": 31}, "seq_len was 15 and is 31 here"),
        ({"packing": "concat"}, "packing was 'chunked' and is 'concat' here"),
        ({"lanes": 12}, "lanes was 6 and is 12 here"),
        ({"shuffle": False}, "shuffle was True and is False here"),
        ({"bos": True}, "framing.bos was None and is"),
        ({"tokenizer": llama3_like()}, "tokenizer was"),
    ]:
        with make(corpora["jsonl"], **options) as other:
            refused(StateMismatch, f"another run: .*{name}", other.load_state_dict, state)
    with make(corpora["parquet"]) as other:
        refused(StateMismatch, "another run: data was", other.load_state_dict, state)
    with make(corpora["jsonl"], "best_fit_crop") as crop:
        state = crop.state_dict()
    with make(corpora["jsonl"], "best_fit_crop", buffer_size=6) as other:
        refused(StateMismatch, "buffer_size was 5 and is 6", other.load_state_dict, state)


def test_what_is_no_matter_of_rows_may_differ(corpora: dict[str, Path]) -> None:
    with make(corpora["jsonl"]) as stream:
        taken(stream, 7)
        state = through_json(stream.state_dict())
        expected = taken(stream, 8)
    for options in (
        {"policy": "reject"},
        {"pack_sequences": True},
        {"threads": 5},
        {"buffer_size": 9, "tokenizer_batch_size": 2},
        {"steps": 100},
    ):
        with make(corpora["jsonl"], **options) as other:
            other.load_state_dict(state)
            assert taken(other, 8) == expected


def states_of(path: Path, world: int, rows: int = 2, **options: Any) -> list[dict[str, Any]]:
    found = []
    for rank in range(world):
        with make(path, rank=rank, world=world, **options) as stream:
            taken(stream, rows)
            found.append(through_json(stream.state_dict()))
    return found


def test_an_unmerged_state_on_other_lanes_names_those_that_it_lacks(
    corpora: dict[str, Path],
) -> None:
    first, second = states_of(corpora["jsonl"], 2)
    with make(corpora["jsonl"]) as alone:
        refused(
            StateMismatch,
            "no address of lanes 1, 3, 5: rank 0 of 1 needs them; join .* with merge_states",
            alone.load_state_dict,
            first,
        )
        before = alone.state_dict()
        assert before["row"] == 0, "refused is not half loaded"
        alone.load_state_dict(merge_states([second, first]))
    with make(corpora["jsonl"], rank=1, world=2) as other:
        refused(StateMismatch, "no address of lanes 1, 3, 5", other.load_state_dict, first)
    merged = merge_states([first, second])
    del merged["lanes"]["4"]
    with make(corpora["jsonl"], rank=1, world=3) as other:
        other.load_state_dict(merged)  # at row 4, lane 4 is rank 0's
    with make(corpora["jsonl"], rank=0, world=3) as other:
        refused(StateMismatch, "no address of lane 4: rank 0 of 3", other.load_state_dict, merged)


def test_states_that_are_not_of_one_checkpoint_are_not_joined(corpora: dict[str, Path]) -> None:
    a = states_of(corpora["jsonl"], 2)
    later = states_of(corpora["jsonl"], 2, rows=3)
    other = states_of(corpora["jsonl"], 2, seed=9)
    refused(StateMismatch, "different batches: .* rows 4, 6", merge_states, [a[0], later[1]])
    refused(StateMismatch, "another run: seed was", merge_states, [a[0], other[1]])
    changed = copy.deepcopy(a[0])
    changed["lanes"]["0"][2] += 1
    refused(StateMismatch, "two of these states know lane 0, at", merge_states, [a[0], changed])
    assert merge_states([a[0], a[0], a[1]]) == merge_states(a)
    refused(ConfigError, "takes the list of all ranks' states", merge_states, [])
    refused(ConfigError, "takes the list of all ranks' states", merge_states, a[0])
    refused(StateMismatch, "not a state of a stream: it is None", merge_states, [a[0], None])
    assert merge_states([merge_states(a)]) == merge_states(a)


def test_a_state_of_a_later_release_says_so(corpora: dict[str, Path]) -> None:
    with make(corpora["jsonl"]) as stream:
        state = stream.state_dict() | {"version": 7}
        refused(StateMismatch, "version 7, and this Penstock reads up to", load, stream, state)


def load(stream: TextStream, state: Any) -> None:
    stream.load_state_dict(state)


JUNK = [None, -1, 0, 7, 1 << 70, 2.5, True, "", "x", "9" * 5000, [], [[]], {}, {"0": 1}, [1, 2, 3]]


def damage(value: Any, luck: random.Random) -> Any:
    """The value with one thing in it another one, or gone."""
    if isinstance(value, (dict, list)) and value and luck.random() < 0.93:
        value = copy.copy(value)
        key = luck.choice(list(value) if isinstance(value, dict) else range(len(value)))
        roll = luck.random()
        if roll < 0.12:
            del value[key]
        elif roll < 0.2 and isinstance(value, dict):
            value[str(luck.choice(JUNK))] = value.pop(key)
        elif roll < 0.25 and isinstance(value, list):
            value.insert(key, luck.choice(JUNK))
        else:
            value[key] = damage(value[key], luck)
        return value
    if type(value) is int and luck.random() < 0.7:
        return max(0, value + luck.choice([-5, -1, 1, 2, 6, 12, 10**6]))
    return luck.choice(JUNK)


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_damaged_state_is_refused_in_words_or_streams(
    corpora: dict[str, Path], packing: str
) -> None:
    luck = random.Random(5)
    refusals = []
    with make(corpora["jsonl"], packing) as stream:
        taken(stream, 40)
        states = [through_json(stream.state_dict())]
    states[0]["lanes"] = {lane: states[0]["lanes"][lane] for lane in ("0", "1", "2", "3", "4", "5")}
    with make(corpora["jsonl"], packing, threads=2) as stream:
        for _ in range(90):
            state = damage(states[0], luck)
            if luck.random() < 0.6:
                state = states[0] | {"lanes": damage(states[0]["lanes"], luck)}
            if luck.random() < 0.3:
                state = damage(state, luck)
            try:
                merge_states([state])
                stream.load_state_dict(state)
                taken(stream, 7)
            except (StateMismatch, ConfigError) as error:
                refusals.append(str(error))
        stream.load_state_dict(states[0])
        assert stream.state_dict() == states[0]
    assert len(refusals) > 40
    assert all("\n" not in message and len(message) < 900 for message in refusals)


def test_states_may_come_from_any_iterable() -> None:
    state = {"version": 1, "row": 4, "step": 2, "lanes": {"0": [0, 0, 2]}, "identity": {}}
    assert merge_states(each for each in (state, state)) == state
    with pytest.raises(ConfigError, match="the list of all ranks' states"):
        merge_states(iter(()))
