"""Mixtures are exact integers: which sample a position takes, against law 3 done in slow Python."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.order import reference

from penstock.errors import ConfigError
from penstock.order import MixtureOrder, Stage, quantise

FAR = 10**13

weight = st.just(0.0) | st.floats(1e-6, 1) | st.sampled_from([1e-6, 1.0, 1e-300])


@st.composite
def mixtures(draw: st.DrawFn) -> MixtureOrder:
    """Up to nine sources, small enough to be used up; stages that begin and end anywhere."""
    sources = draw(st.integers(1, 9))
    sizes = draw(st.lists(st.integers(1, 3000), min_size=sources, max_size=sources))
    first = draw(st.sampled_from([1, 100, 4096, 5000, FAR, 2**60]))
    further = draw(st.lists(st.sampled_from([1, 7, 4095, 4096, 4097, 9000]), max_size=3))
    starts = [0, *np.cumsum([first, *further]).tolist()] if draw(st.booleans()) else [0]
    weights = st.lists(weight, min_size=sources, max_size=sources).filter(any)
    return MixtureOrder(
        sizes,
        [f"source {i}" for i in range(sources)],
        seed=draw(st.integers(-(2**63), 2**64)),
        stages=[Stage.of(draw(weights), start) for start in starts],
        shuffle=draw(st.booleans()),
    )


def slowly(order: MixtureOrder) -> reference.Mixture:
    stages = [(stage.position, stage.weights) for stage in order.stages]
    return reference.Mixture(order.sizes.tolist(), order.names, order.seed, stages, order.shuffle)


def some_positions(order: MixtureOrder, rng: random.Random) -> npt.NDArray[np.int64]:
    """About the edges of stages and blocks, and in between."""
    edges = [stage.position + b * 4096 for stage in order.stages for b in (0, 1, 2)]
    found = {max(edge + rng.randint(-3, 3), 0) for edge in edges}
    found |= {edge + rng.randrange(10_000) for edge in edges}
    return np.array(sorted(found))


@given(mixtures(), st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_sources_ordinals_and_samples_are_those_of_the_law(
    order: MixtureOrder, rng: random.Random
) -> None:
    positions, slow = some_positions(order, rng), slowly(order)
    expected = [slow.draw(position) for position in positions.tolist()]
    source, ordinal = order.draws(positions)
    found = zip(source.tolist(), ordinal.tolist(), order.indices(positions).tolist(), strict=True)
    assert list(found) == expected


@given(mixtures(), st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_counts_are_those_of_the_law_and_of_the_draws(
    order: MixtureOrder, rng: random.Random
) -> None:
    slow = slowly(order)
    for position in some_positions(order, rng).tolist():
        counts = order.counts(position)
        assert counts.tolist() == slow.counts(position)
        assert counts.sum() == position
        source, ordinal = order.draws(position + np.arange(50))
        later = order.counts(position + 50)
        assert np.array_equal(later - counts, np.bincount(source, minlength=len(counts)))
        for each in set(source.tolist()):  # ordinals go on from the count, one by one
            of_it = ordinal[source == each]
            assert of_it.tolist() == list(range(counts[each], counts[each] + len(of_it)))


@given(mixtures())
@settings(max_examples=25)
def test_counts_from_the_start_are_a_bincount_of_the_draws(order: MixtureOrder) -> None:
    source, _ = order.draws(np.arange(20_000))
    for position in (0, 1, 4095, 4096, 4097, 9999, 20_000):
        expected = np.bincount(source[:position], minlength=len(order.sizes))
        assert np.array_equal(order.counts(position), expected)


@given(mixtures())
@settings(max_examples=25)
def test_no_sample_comes_again_before_its_source_is_used_up(order: MixtureOrder) -> None:
    """Whatever stages begin in between, a source gives whole epochs, with each sample once."""
    positions = np.arange(25_000)
    source, _ = order.draws(positions)
    indices = order.indices(positions)
    first = np.cumsum(order.sizes) - order.sizes
    for each, size in enumerate(order.sizes.tolist()):
        given = indices[source == each] - first[each]
        for epoch in range(0, len(given), size):
            part = given[epoch : epoch + size]
            assert len(set(part.tolist())) == len(part)
            assert len(part) < size or sorted(part.tolist()) == list(range(size))


@given(mixtures(), st.integers(1, 5000), st.integers(0, 2**62))
@settings(max_examples=40)
def test_what_a_rank_sees_is_every_so_many_th_of_the_whole(
    order: MixtureOrder, world: int, rank: int
) -> None:
    count = 20_000
    whole = order.indices(np.arange(count))
    mine = np.arange(rank % world, count, world)
    assert np.array_equal(order.indices(mine), whole[mine])


def test_a_rank_among_4096_sees_its_part_of_the_whole() -> None:
    stages = [Stage.of([1, 2, 3]), Stage.of([3, 0, 1], 9999)]
    order = MixtureOrder([100, 2000, 30], list("abc"), seed=3, stages=stages)
    whole = order.indices(np.arange(60 * 4096))
    for rank in (0, 1, 2048, 4095):
        mine = np.arange(rank, 60 * 4096, 4096)
        assert np.array_equal(order.indices(mine), whole[mine])


def test_positions_may_be_of_any_integer_type_in_any_order_and_none() -> None:
    order = MixtureOrder(
        [100, 50], ["a", "b"], seed=0, stages=[Stage.of([2, 1]), Stage.of([1, 3], 70)]
    )
    expected = order.indices(np.arange(120))
    for dtype in (np.uint8, np.int16, np.int32, np.uint32, np.uint64):
        assert np.array_equal(order.indices(np.arange(120).astype(dtype)), expected)
    mixed = np.random.default_rng(0).permutation(120)
    assert np.array_equal(order.indices(mixed), expected[mixed])
    assert order.indices(mixed[:0]).tolist() == []
    for found in (order.indices(mixed), *order.draws(mixed), order.counts(7)):
        assert found.dtype == np.int64


# ------------------------------------------------------------------------------- quotas


@pytest.mark.parametrize("sources", [2, 10, 1000])
def test_quotas_hold_for_weights_from_a_millionth_to_one(sources: int) -> None:
    """At each multiple of 4,096 positions the tree's own counts; a millionth is met in time."""
    weights = np.logspace(-6, 0, sources)
    integers = quantise(weights.tolist())
    order = MixtureOrder(
        [1000] * sources,
        [str(i) for i in range(sources)],
        seed=0,
        stages=[Stage(0, integers)],
    )
    blocks = 256
    source, _ = order.draws(np.arange(blocks * 4096))
    for block in (1, 2, 3, 100, blocks):
        given = np.bincount(source[: block * 4096], minlength=sources)
        assert given.tolist() == reference.split(block * 4096, integers)
        share = block * 4096 * np.array(integers) / 2**32
        assert (abs(given - share) <= max(1, (sources - 1).bit_length())).all()


def test_a_weight_of_a_millionth_is_one_sample_in_a_million() -> None:
    order = MixtureOrder([10, 10], ["a", "b"], seed=0, stages=[Stage.of([1e-6, 1 - 1e-6])])
    assert order.counts(10**9)[0] == 1000
    assert order.counts(10**15)[0] == round(10**15 * (4295 / 2**32))  # what 2^32 can say of 1e-6


def test_a_weight_of_one_part_in_2_to_the_32_is_met_after_2_to_the_32_positions() -> None:
    order = MixtureOrder([10, 10], ["a", "b"], seed=0, stages=[Stage.of([1e-300, 1])])
    assert order.counts(2**32).tolist() == [1, 2**32 - 1]
    last_block = np.arange(2**32 - 4096, 2**32)
    assert sorted(order.draws(last_block)[0].tolist()) == [0] + [1] * 4095


def test_a_stage_with_weight_zero_gives_none_and_the_next_goes_on_where_it_was_left() -> None:
    stages = [Stage.of([1, 1]), Stage.of([1, 0], 1000), Stage.of([1, 1], 3000)]
    order = MixtureOrder([10_000, 10_000], ["a", "b"], seed=0, stages=stages)
    source, ordinal = order.draws(np.arange(6000))
    assert not source[1000:3000].any()
    assert ordinal[source == 1].tolist() == list(range(int((source == 1).sum())))


# ------------------------------------------------------------------------------- names, seeds


def test_a_source_keeps_its_own_order_in_another_place_and_in_other_company() -> None:
    """Sources may be listed anew or added: the samples of "web" come in the order they had."""

    def web(names: list[str], seed: int = 5) -> list[int]:
        sizes = [700 if name == "web" else 40 for name in names]
        order = MixtureOrder(sizes, names, seed=seed, stages=[Stage.of([1.0] * len(names))])
        source, _ = order.draws(np.arange(4096))
        mine = names.index("web")
        found = order.indices(np.arange(4096))[source == mine] - sum(sizes[:mine])
        return [int(index) for index in found[:800]]

    alone = web(["web", "code"])
    assert web(["code", "web"]) == alone
    assert web(["books", "web", "code", "math"]) == alone[:800]
    assert web(["web", "code"], seed=6) != alone


def test_sources_of_equal_size_have_orders_of_their_own() -> None:
    order = MixtureOrder([500, 500], ["a", "b"], seed=0, stages=[Stage.of([1, 1])])
    source, _ = order.draws(np.arange(1000))
    indices = order.indices(np.arange(1000))
    assert indices[source == 0].tolist() != (indices[source == 1] - 500).tolist()


def test_a_seed_is_its_value_whatever_its_type() -> None:
    def order(seed: int) -> list[int]:
        mixture = MixtureOrder([50, 70], ["a", "b"], seed=seed, stages=[Stage.of([1, 2])])
        return [int(index) for index in mixture.indices(np.arange(200))]

    assert order(7) == order(np.int64(7)) == order(np.uint8(7))  # type: ignore[arg-type]


def test_without_shuffle_each_source_comes_in_its_own_order_evenly_spread() -> None:
    order = MixtureOrder([5000, 2000], ["a", "b"], seed=0, stages=[Stage.of([3, 1])], shuffle=False)
    assert order.indices(np.arange(8)).tolist() == [0, 1, 5000, 2, 3, 4, 5001, 5]
    source, ordinal = order.draws(np.arange(3 * 4096))
    indices = order.indices(np.arange(3 * 4096))
    for each, first, size in [(0, 0, 5000), (1, 5000, 2000)]:
        assert ordinal[source == each].tolist() == list(range(int((source == each).sum())))
        assert np.array_equal(indices[source == each], first + ordinal[source == each] % size)


@given(mixtures())
@settings(max_examples=25)
def test_without_shuffle_every_stretch_has_its_shares(order: MixtureOrder) -> None:
    """Small epochs, too, meet every source: after any position within one sample a source or so."""
    still = MixtureOrder(
        order.sizes.tolist(), order.names, seed=0, stages=order.stages[:1], shuffle=False
    )
    source, _ = still.draws(np.arange(8192))
    given = np.cumsum(source[:, None] == np.arange(len(order.sizes)), axis=0)
    share = np.arange(1, 8193)[:, None] * np.array(order.stages[0].weights) / 2**32
    assert (abs(given - share) < 3 + len(order.sizes) / 2).all()


# ------------------------------------------------------------------------------- stages


def by_hand(*starts: int) -> list[Stage]:
    return [Stage.of([1, i + 1], start) for i, start in enumerate(starts)]


def with_stages(*stages: Stage) -> MixtureOrder:
    return MixtureOrder([50, 70], ["a", "b"], seed=9, stages=list(stages))


NEW = quantise([5, 3])


def test_a_stage_begun_by_hand_leaves_all_before_it_as_it_was() -> None:
    old = with_stages(*by_hand(0, 100))
    new = old.with_stage(Stage(5003, NEW))
    positions = np.arange(5003)
    assert np.array_equal(old.indices(positions), new.indices(positions))
    assert new.counts(5003).tolist() == old.counts(5003).tolist()
    assert new.counts(5003 + 8 * 4096)[0] - new.counts(5003)[0] == 5 * 4096
    assert [stage.position for stage in new.stages] == [0, 100, 5003]
    assert (new.seed, new.names, new.sizes.tolist()) == (9, ("a", "b"), [50, 70])
    assert old.stages == tuple(by_hand(0, 100))


def test_a_stage_begun_by_hand_takes_the_place_of_those_begun_there_or_later() -> None:
    order = with_stages(*by_hand(0, 100, 200))
    assert order.with_stage(Stage(100, NEW)).stages == (*by_hand(0), Stage(100, NEW))
    assert order.with_stage(Stage(99, NEW)).stages == (*by_hand(0), Stage(99, NEW))
    assert order.with_stage(Stage(0, NEW)).stages == (Stage(0, NEW),)


def test_declared_stages_that_lie_ahead_stay() -> None:
    declared = [Stage.of([1, 1], 0, 0), Stage.of([1, 2], 100, 10), Stage.of([1, 3], 200, 20)]
    order = with_stages(*declared).with_stage(Stage(50, NEW))
    assert order.stages == (declared[0], Stage(50, NEW), *declared[1:])
    order = order.with_stage(Stage(150, NEW))
    assert order.stages == (declared[0], Stage(50, NEW), declared[1], Stage(150, NEW), declared[2])
    order = order.with_stage(Stage(40, NEW))
    assert order.stages == (declared[0], Stage(40, NEW), *declared[1:])


def test_a_declared_stage_gives_way_at_its_own_start_but_keeps_its_step() -> None:
    """Its learning rate goes by that step, and has nothing to do with the weights."""
    order = with_stages(Stage.of([1, 1]), Stage.of([1, 2], 100, 10)).with_stage(Stage(100, NEW))
    assert order.stages == (Stage.of([1, 1]), Stage(100, NEW, 10))


def test_a_new_stage_with_the_old_weights_changes_no_count_at_whole_blocks() -> None:
    order = with_stages(Stage.of([2, 1]))
    again = order.with_stage(Stage(4096 * 3, quantise([2, 1])))
    for block in range(10):
        assert order.counts(block * 4096).sum() == again.counts(block * 4096).sum()
        assert abs(order.counts(block * 4096) - again.counts(block * 4096)).max() <= 1


@pytest.mark.parametrize(
    ("sizes", "names", "stages", "words"),
    [
        ([5], ["a"], [], "first stage starts at position 0"),
        ([5], ["a"], [Stage.of([1], 3)], "first stage starts at position 0"),
        ([5], ["a"], [Stage.of([1]), Stage.of([1], 7), Stage.of([1], 7)], r"\[0, 7, 7\]"),
        ([5, 5], ["a", "b"], [Stage.of([1])], "not 1 weights and 2 names"),
        ([5, 5], ["a"], [Stage.of([1, 1])], "not 2 weights and 1 names"),
        ([5, 0], ["a", "b"], [Stage.of([1, 1])], "'b' has a weight but no samples"),
        ([5, 5], ["a", "a"], [Stage.of([1, 1])], "different names"),
        ([5, -1], ["a", "b"], [Stage.of([1, 0])], "0 samples or more"),
    ],
)
def test_a_mixture_that_cannot_be_meant_is_refused(
    sizes: list[int], names: list[str], stages: list[Stage], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        MixtureOrder(sizes, names, seed=0, stages=stages)


def test_a_source_without_samples_needs_weight_zero_in_every_stage() -> None:
    order = MixtureOrder([5, 0, 3], list("abc"), seed=0, stages=[Stage.of([1, 0, 1])])
    assert sorted(set(order.indices(np.arange(1000)).tolist())) == list(range(8))
    with pytest.raises(ConfigError, match="'b' has a weight"):
        order.with_stage(Stage.of([1, 1, 1], 5))


def test_a_mixture_without_a_single_sample_has_no_order() -> None:
    order = MixtureOrder([0, 0], ["a", "b"], seed=0, stages=[Stage.of([1, 1])])
    with pytest.raises(ConfigError, match="without a single sample"):
        order.indices(np.arange(1))


# ------------------------------------------------------------------------------- costs


def test_a_position_costs_the_same_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any 4,096 positions lie in two blocks, and a count needs one: at 2^62 as at the start."""
    made: list[tuple[int, int]] = []
    make = MixtureOrder._make_block

    def counted(self: MixtureOrder, stage: int, block: int) -> object:
        made.append((stage, block))
        return make(self, stage, block)

    monkeypatch.setattr(MixtureOrder, "_make_block", counted)
    order = with_stages(*by_hand(0, FAR, 2**62 - 10))
    for position in (0, 5000, FAR - 2000, FAR + 4096, 2**61, 2**62 - 3000, 2**62):
        made.clear()
        order.indices(position + np.arange(4096))
        assert len(made) <= 3  # one more where a stage begins
        made.clear()
        order.counts(position + 4096)
        assert len(made) <= 1


def test_only_a_few_blocks_are_kept() -> None:
    order = with_stages(Stage.of([1, 1]))
    order.indices(np.arange(0, 100 * 4096, 1000))
    assert len(order._blocks) <= 8


def test_the_reference_says_what_can_be_counted_by_hand() -> None:
    slow = reference.Mixture([2, 3], ["a", "b"], 0, [(0, (2**31, 2**31)), (9, (2**32, 0))], False)
    assert [slow.draw(p)[:2] for p in range(4)] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [slow.draw(p)[:2] for p in (7, 8, 9, 10)] == [(1, 3), (0, 4), (0, 5), (0, 6)]
    assert slow.draw(10) == (0, 6, 0)
    assert slow.counts(4096 + 9) == [4096 + 5, 4]
