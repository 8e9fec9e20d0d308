"""Request seeds: in range, stable, and different for each place in the run."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from coordexp.rollouts.backend import MAX_SEED, DatasetSeeds, SeedContext, request_seed

PINNED = [363490752, 1634158894]
ANY = st.integers(0, 2**40)


@given(st.tuples(ANY, ANY, ANY, ANY, ANY))
def test_seeds_are_positive_int32(place):
    assert 1 <= request_seed(*place) <= MAX_SEED == 2**31 - 1


def test_seeds_do_not_change_between_releases_or_processes():
    assert [request_seed(42, 0, 0, 0, 0), request_seed(42, 1000, 3, 7, 16)] == PINNED


def test_every_part_of_the_place_counts():
    places = list(itertools.product(range(3), range(5), range(4), range(4), range(4)))
    assert len({request_seed(*place) for place in places}) == len(places)


def test_a_round_hands_each_part_of_its_place_to_the_seed():
    assert SeedContext(training_seed=42, global_step=1000, micro_step_idx=3, rank=7).seed_of(16) == PINNED[1]
    places = [(42, 5, 0, 0), (42, 5, 1, 0), (42, 5, 0, 1), (42, 6, 0, 0), (43, 5, 0, 0)]
    assert len({SeedContext(*place).seed_of(0) for place in places}) == len(places)


def test_neighbours_in_a_data_set_have_neighbouring_seeds():
    """An engine that counts up from a call's first seed gives each of its answers the seed of its own place."""
    first = DatasetSeeds(42, 0).seed_of(0)
    seeds = [DatasetSeeds(42, position - 1).seed_of(1) for position in (1, 2, 1000)]
    assert seeds == [first + 1, first + 2, first + 1000]
    assert len({DatasetSeeds(training_seed, 0).seed_of(0) for training_seed in range(100)}) == 100
    assert all(1 <= DatasetSeeds(training_seed, 2**30 - 1).seed_of(0) <= MAX_SEED for training_seed in range(100))


def test_each_answer_of_a_sample_has_its_own_seed() -> None:
    assert DatasetSeeds(42, 7, answer=0).seed_of(0) == DatasetSeeds(42, 7).seed_of(0)
    seeds = [DatasetSeeds(42, 7, answer=k).seed_of(0) for k in range(64)]
    assert len(set(seeds)) == 64 and all(1 <= seed <= MAX_SEED for seed in seeds)
    assert DatasetSeeds(42, 7, answer=5).seed_of(2) == DatasetSeeds(42, 9, answer=5).seed_of(0)
