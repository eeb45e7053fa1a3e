import numpy as np
import pytest
from helpers_paging import trace_of, traces
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve_placement.paging import decode_steps
from moeserve_placement.paging.belady import Oracle
from moeserve_placement.paging.logistic import fit_logistic, sigmoid
from moeserve_placement.paging.neighbours import NeighbourPredictor
from moeserve_placement.paging.predictors import CountTablePredictor
from moeserve_placement.paging.prefetch import Calibration, bins
from moeserve_placement.paging.tables import TransitionCounts

PREDICTORS = [CountTablePredictor, NeighbourPredictor]


def made(kind, steps, horizon=1):
    """A predictor for as many lanes as it was trained with."""
    if kind is NeighbourPredictor:
        return kind(steps, batch=steps.batch, horizon=horizon, memory=16)
    return kind(steps, horizon=horizon)


def follow(predictor, steps):
    """The chances after every step, [num_steps, horizon, num_layers, num_experts]."""
    places = [steps.tokens(step) for step in range(steps.num_steps)]
    return np.stack(
        [
            np.array(predictor.observe(steps.topk_ids[at], steps.lanes[at], steps.is_first[at]))
            for at in places
        ]
    )


def chain(num_tokens, seed):
    """Layer 0 is random; each further layer, and the next token's layer 0, follows by a rule."""
    rng = np.random.default_rng(seed)
    ids = np.empty((num_tokens, 4, 1), dtype=np.int64)
    ids[:, 0, 0] = rng.integers(0, 6, num_tokens)
    for layer in range(1, 4):
        ids[:, layer] = (ids[:, layer - 1] + layer) % 6
    return trace_of(ids, 6)


@pytest.mark.parametrize("kind", PREDICTORS)
def test_a_deterministic_chain_of_layers_is_predicted(kind):
    predictor = kind(decode_steps(chain(900, 0)), horizon=2)
    scored = decode_steps(chain(50, 1))
    chances = follow(predictor, scored)
    for ahead in (1, 2):
        for layer in range(4 - ahead):
            guess = chances[:, ahead - 1, layer].argmax(axis=1)
            assert np.array_equal(guess, scored.topk_ids[:, layer + ahead, 0])


@pytest.mark.parametrize("kind", PREDICTORS)
def test_first_layer_of_the_next_token_is_predicted_from_the_last(kind):
    ids = np.empty((900, 3, 1), dtype=np.int64)
    ids[:, :, 0] = np.arange(900)[:, None] % 5 + np.arange(3)
    steps = decode_steps(trace_of(ids, 7))
    chances = follow(kind(steps, horizon=1), steps)
    guess = chances[:-1, 0, 2].argmax(axis=1)
    assert (guess == ids[1:, 0, 0]).mean() > 0.99


@pytest.mark.parametrize("kind", PREDICTORS)
@settings(max_examples=25, deadline=None)
@given(trace=traces(max_layers=4), batch=st.integers(1, 3), seed=st.integers(0, 99))
def test_predictions_rest_only_on_layers_already_done(kind, trace, batch, seed):
    if trace.num_layers < 2:
        return
    steps = decode_steps(trace, batch=batch)
    first, second = made(kind, steps), made(kind, steps)
    for step in range(steps.num_steps - 1):
        at = steps.tokens(step)
        for predictor in (first, second):
            predictor.observe(steps.topk_ids[at], steps.lanes[at], steps.is_first[at])
    at = steps.tokens(steps.num_steps - 1)
    done = seed % (trace.num_layers - 1) + 1
    changed = steps.topk_ids[at].copy()
    changed[:, done:] = (changed[:, done:] + 1) % steps.num_experts
    before = first.observe(steps.topk_ids[at], steps.lanes[at], steps.is_first[at])
    after = second.observe(changed, steps.lanes[at], steps.is_first[at])
    assert np.array_equal(before[:, :done], after[:, :done])
    assert np.all((before >= 0) & (before <= 1))


@settings(max_examples=40, deadline=None)
@given(traces(max_layers=4))
def test_tables_count_every_pair_once(trace):
    if trace.num_layers < 2:
        return
    counts = TransitionCounts(trace.num_layers, trace.num_experts, horizon=1)
    ids = trace.topk_ids.astype(np.int64)
    first = np.zeros(len(ids), bool)
    first[trace.sequence_starts] = True
    counts.add(ids, np.roll(ids, 1, axis=0), ~first)
    expected_layer, expected_token = np.zeros_like(counts.by_layer), np.zeros_like(counts.by_token)
    for token in range(len(ids)):
        for layer in range(trace.num_layers):
            wraps = layer == trace.num_layers - 1
            later = token + wraps
            if not wraps or (later < len(ids) and not first[later]):
                target = ids[later, (layer + 1) % trace.num_layers]
                for i in ids[token, layer]:
                    expected_layer[0, layer, i, target] += 1
            if token + 1 < len(ids) and not first[token + 1]:
                for i in ids[token, layer]:
                    expected_token[layer, i, ids[token + 1, layer]] += 1
    assert np.array_equal(counts.by_layer, expected_layer)
    assert np.array_equal(counts.by_token, expected_token)


def test_logistic_regression_finds_the_weights_that_made_the_data():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(40_000, 2))
    labels = rng.random(40_000) < sigmoid(rows @ [1.5, -0.7] - 0.4)
    assert fit_logistic(rows, labels) == pytest.approx([1.5, -0.7, -0.4], abs=0.06)


def test_calibration_moves_from_what_is_said_to_what_happens():
    calibration = Calibration(1)
    place = int(bins(np.array(0.5)))
    assert calibration.chance(1, place, 0.5) == 0.5
    for turn in range(1000):
        calibration.observe(1, place, turn % 10 == 0)
    assert calibration.chance(1, place, 0.5) == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize("kind", PREDICTORS)
@pytest.mark.parametrize("horizon", [0, 3])
def test_horizon_must_lie_within_the_layers(kind, horizon):
    steps = decode_steps(trace_of([[[0], [0], [0]]] * 3, 2))
    with pytest.raises(ValueError, match=f"horizon = {horizon}"):
        kind(steps, horizon=horizon)


def test_neighbours_find_the_rest_of_a_path_that_was_seen_once():
    rng = np.random.default_rng(0)
    tokens = np.argsort(rng.random((30, 8, 16)), axis=2)[:, :, :2]
    training = decode_steps(trace_of(tokens[rng.permutation(30)], 16))
    scored = decode_steps(trace_of(tokens[rng.permutation(30)], 16))
    chances = follow(NeighbourPredictor(training, horizon=2), scored)
    for ahead in (1, 2):
        guess = np.argsort(-chances[:, ahead - 1, 2:-ahead], axis=2)[:, :, :2]
        truth = scored.topk_ids[:, 2 + ahead :]
        assert (np.sort(guess, axis=2) == np.sort(truth, axis=2)).mean() > 0.9


def test_neighbour_memory_forgets_the_oldest_tokens():
    ids = np.zeros((40, 3, 1), dtype=np.int64)
    ids[:20, 1:] = 1  # What followed expert 0 at first,
    ids[20:, 1:] = 2  # and since then.
    predictor = NeighbourPredictor(decode_steps(trace_of(ids, 3)), horizon=1, memory=10)
    chances = predictor.observe(ids[-1:], np.array([0]), np.array([True]))
    assert chances[0, 0, 2] > 0.9 and chances[0, 0, 1] < 0.1


@settings(max_examples=25, deadline=None)
@given(trace=traces(max_layers=4), horizon=st.integers(1, 5), batch=st.integers(1, 3))
def test_oracle_says_what_comes(trace, horizon, batch):
    steps = decode_steps(trace, batch=batch)
    chances = follow(Oracle(steps, horizon=horizon), steps)
    path = steps.used.reshape(-1, steps.num_experts)
    for ahead in range(1, horizon + 1):
        told = chances[:, ahead - 1].reshape(path.shape)
        assert np.array_equal(told[:-ahead], path[ahead:])
        assert not told[-ahead:].any()
