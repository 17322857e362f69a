"""Tokens for mixed batches: parameters of each row, history, seeds, logprobs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from freetoken.wire.messages import Sampling, pack_ids, unpack_ids
from freetoken.worker.faults import StepError
from freetoken.worker.sampler import Sampler

VOCAB_SIZE = 50
GREEDY = Sampling(temperature=0.0)


def make_sampler(*rows, prompts=(), vocab_size=VOCAB_SIZE, outputs=()):
    """A sampler with row i started with `rows[i]`."""
    sampler = Sampler(max(len(rows), 1), vocab_size, torch.device("cpu"))
    for i, sampling in enumerate(rows):
        prompt = prompts[i] if i < len(prompts) else []
        output = outputs[i] if i < len(outputs) else []
        sampler.start(i, sampling, len(output), pack_ids(prompt), pack_ids(output))
    return sampler


def ids(*rows):
    return np.array(rows, np.int64)


def random_logits(num_rows, seed=0, vocab_size=VOCAB_SIZE):
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


def draw_many(sampling, logits, count, **history):
    """Tokens of `count` rows that differ only in their seeds."""
    rows = [replace_seed(sampling, seed) for seed in range(count)]
    sampler = make_sampler(*rows, **history)
    return sampler.sample(np.arange(count), logits.expand(count, -1)).tokens


def replace_seed(sampling, seed):
    import msgspec

    return msgspec.structs.replace(sampling, seed=seed)


def assert_follows(tokens, probabilities):
    """Chi-square test of the frequencies, five deviations wide, over tokens expected often."""
    count = len(tokens)
    observed = torch.bincount(tokens, minlength=len(probabilities)).double()
    assert observed[probabilities == 0].sum() == 0, "an excluded token was drawn"
    expected = probabilities.double() * count
    common = expected >= 5
    chi_square = ((observed - expected) ** 2 / expected)[common].sum().item()
    degrees = int(common.sum())
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5


def test_greedy_takes_the_likeliest():
    logits = random_logits(3)
    sampled = make_sampler(GREEDY, GREEDY, GREEDY).sample(ids(0, 1, 2), logits)
    assert sampled.tokens.tolist() == logits.argmax(-1).tolist()
    assert sampled.logprobs is None


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(top_k=5),
        Sampling(top_p=0.7),
        Sampling(min_p=0.1),
        Sampling(temperature=1.7, top_k=20, top_p=0.8, min_p=0.05),
    ],
    ids=str,
)
def test_frequencies_follow_the_filtered_distribution(sampling):
    logits = random_logits(1)
    probabilities = reference_probabilities(logits, sampling)[0]
    assert_follows(draw_many(sampling, logits, 20_000), probabilities)


def reference_probabilities(logits, sampling):
    """By transformers' processors, in transformers' order."""
    from transformers.generation import logits_process as hf

    scores = hf.TemperatureLogitsWarper(sampling.temperature)(None, logits)
    if sampling.top_k:
        scores = hf.TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = hf.TopPLogitsWarper(sampling.top_p)(None, scores)
    if sampling.min_p:
        scores = hf.MinPLogitsWarper(sampling.min_p)(None, scores)
    return scores.softmax(-1)


def test_a_row_draws_the_same_alone_and_in_any_batch():
    rows = [
        Sampling(seed=1, temperature=0.8, top_p=0.9),
        GREEDY,
        Sampling(seed=2, top_k=3),
        Sampling(seed=3, presence_penalty=1.5),
        Sampling(seed=4, logit_bias=((7, 9.0),)),
        Sampling(seed=5, min_p=0.2, repetition_penalty=1.3),
    ]
    n = len(rows)
    logits = [random_logits(n, seed) for seed in range(6)]
    prompts = [[1, 2, 3]] * n
    together, reverse = make_sampler(*rows, prompts=prompts), make_sampler(*rows, prompts=prompts)
    found = [together.sample(np.arange(n), step).tokens.tolist() for step in logits]
    backwards = [
        reverse.sample(np.arange(n)[::-1].copy(), step.flip(0)).tokens.tolist()[::-1]
        for step in logits
    ]
    alone = []
    for i, sampling in enumerate(rows):
        sampler = make_sampler(sampling, prompts=[[1, 2, 3]])
        alone.append([sampler.sample(ids(0), step[i : i + 1]).tokens.item() for step in logits])
    assert found == backwards
    assert found == [list(step) for step in zip(*alone, strict=True)]


def test_a_resumed_row_goes_on_with_its_stream_and_its_counts():
    sampling = Sampling(seed=11, frequency_penalty=0.8, repetition_penalty=1.2)
    logits = random_logits(1)
    whole = make_sampler(sampling, prompts=[[4, 5]])
    text = [whole.sample(ids(0), logits).tokens.item() for _ in range(20)]
    resumed = make_sampler(sampling, prompts=[[4, 5]], outputs=[text[:8]])
    assert [resumed.sample(ids(0), logits).tokens.item() for _ in range(12)] == text[8:]


def test_penalties_equal_their_formula_on_counted_tokens():
    logits = random_logits(1)
    sampling = Sampling(
        temperature=0.0, repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=0.4
    )
    prompt, output = [3, 3, 8], [5, 5, 5, 9]
    scores = logits[0].clone()
    for token in {*prompt, *output}:
        scores[token] *= 1.5 if scores[token] < 0 else 1 / 1.5
    for token in set(output):
        scores[token] -= 0.7 + 0.4 * output.count(token)
    # The order of all tokens must agree: each is made the best of the remaining in turn.
    for best in scores.argsort(descending=True).tolist():
        sampler = make_sampler(sampling, prompts=[prompt], outputs=[output])
        assert sampler.sample(ids(0), logits).tokens.item() == best
        logits, scores = mask(logits, best), mask(scores[None], best)[0]


def mask(logits, token):
    masked = logits.clone()
    masked[:, token] = -1e9
    return masked


def test_repetition_penalty_equals_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    logits, history = random_logits(1), [1, 2, 2, 30]
    expected = RepetitionPenaltyLogitsProcessor(1.9)(torch.tensor([history]), logits.clone())
    sampling = Sampling(repetition_penalty=1.9)
    tokens = draw_many(sampling, logits, 20_000, prompts=[history] * 20_000)
    assert_follows(tokens, expected.softmax(-1)[0])


def test_bias_moves_only_its_row_and_can_forbid_and_force():
    logits = random_logits(3)
    best = logits.argmax(-1).tolist()
    force = Sampling(temperature=0.0, logit_bias=((13, 100.0),))
    forbid = Sampling(temperature=0.0, logit_bias=((best[1], -100.0),))
    tokens = make_sampler(force, forbid, GREEDY).sample(ids(0, 1, 2), logits).tokens.tolist()
    assert tokens == [13, logits[1].topk(2).indices[1].item(), best[2]]


def test_ids_beyond_the_vocabulary_change_nothing():
    logits = random_logits(1)
    sampling = Sampling(
        temperature=0.0,
        logit_bias=((VOCAB_SIZE, 100.0), (-1, 100.0)),
        min_tokens=3,
        stop_ids=(VOCAB_SIZE, -1),
        repetition_penalty=1.0,
        presence_penalty=0.001,
    )
    sampler = make_sampler(sampling, prompts=[[VOCAB_SIZE + 3]])
    assert sampler.sample(ids(0), logits).tokens.item() == logits.argmax().item()


def test_stop_ids_are_impossible_before_min_tokens_and_possible_after():
    logits = random_logits(1)
    best, second = logits.topk(2).indices[0].tolist()
    sampling = Sampling(temperature=0.0, min_tokens=2, stop_ids=(best,))
    sampler = make_sampler(sampling)
    tokens = [sampler.sample(ids(0), logits).tokens.item() for _ in range(3)]
    assert tokens == [second, second, best]


def test_logprobs_are_of_the_raw_logits_and_as_many_as_asked():
    logits = random_logits(4)
    rows = (
        Sampling(temperature=0.3, seed=1, logprobs=0, logit_bias=((5, 50.0),)),
        GREEDY,
        Sampling(temperature=0.0, logprobs=5),
        Sampling(temperature=0.0, logprobs=2),
    )
    sampled = make_sampler(*rows).sample(ids(0, 1, 2, 3), logits)
    expected = logits.log_softmax(-1)
    logprobs = sampled.logprobs.read()
    assert logprobs[1] is None
    for row, count in ((0, 0), (2, 5), (3, 2)):
        found = logprobs[row]
        values, top_ids = expected[row].topk(count)
        assert found.sampled == pytest.approx(expected[row, sampled.tokens[row]].item())
        assert list(unpack_ids(found.top_ids)) == top_ids.tolist()
        assert list(found.top) == pytest.approx(values.tolist())
    assert sampled.tokens[0] == 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_are_refused_before_anything_changes(temperature):
    sampling = Sampling(temperature=temperature, seed=1)
    sampler = make_sampler(sampling, sampling)
    logits = random_logits(2)
    broken = logits.clone()
    broken[1, 3] = torch.nan
    with pytest.raises(StepError, match=r"rows \[1\]"):
        sampler.sample(ids(0, 1), broken)
    after = sampler.sample(ids(0, 1), logits).tokens
    assert (
        after.tolist() == make_sampler(sampling, sampling).sample(ids(0, 1), logits).tokens.tolist()
    )


@pytest.mark.parametrize("temperature", [1e-30, 1e-50])  # the second is 0 in fp32
@pytest.mark.parametrize("top_k", [0, 5])
def test_a_tiny_temperature_is_as_good_as_greedy(temperature, top_k):
    logits = random_logits(1) * 50
    tokens = draw_many(Sampling(temperature=temperature, top_k=top_k), logits, 50)
    assert set(tokens.tolist()) == {logits.argmax().item()}


def test_the_smallest_repetition_penalty_leaves_something_to_draw_from():
    logits = random_logits(1) * 1e4
    sampling = Sampling(temperature=0.0, repetition_penalty=1e-6)
    sampler = make_sampler(sampling, prompts=[range(VOCAB_SIZE)])
    assert sampler.sample(ids(0), logits).tokens.tolist() == logits.argmax(-1).tolist()


def test_seats_for_counts_are_reused_by_later_rows():
    sampler = Sampler(8, VOCAB_SIZE, torch.device("cpu"))
    sampling = Sampling(temperature=0.0, presence_penalty=100.0)
    logits = random_logits(8)
    for _ in range(5):
        for row in range(8):
            sampler.start(row, sampling, 0, b"", b"")
        first = sampler.sample(np.arange(8), logits).tokens
        second = sampler.sample(np.arange(8), logits).tokens
        assert first.tolist() == logits.argmax(-1).tolist(), "counts of the row before are gone"
        assert (first != second).all()
        for row in range(8):
            sampler.forget(row)
