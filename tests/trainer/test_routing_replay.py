"""Tests of the replay of recorded experts in the trainer, against a loop over all experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from worlds.models.mixture_world import (
    KINDS,
    NORMALISES,
    NUM_CHOSEN,
    NUM_EXPERTS,
    TEMPERATURE,
    Gradients,
    compute_padded,
    gradients_of,
    load_plain,
    merged_samples,
    perturbed,
    record,
    recorded_batch,
    recorded_trajectories,
    routers_of,
    surrogate,
    unmerged_samples,
    weigh,
    write_mixture,
)

from actors.batch import MicroBatch
from actors.expert_records import ExpertRecords, MixtureShape
from actors.merge.packing import pack_minibatch, pack_row
from actors.trainer.model import PolicyModel, RowTensors, load_policy, row_tensors
from actors.trainer.routing_replay import replay_choice

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, because small matrices do not profit from more."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return directories of random mixtures, by kind."""
    return {kind: write_mixture(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


def load(model: str, *, is_frugal: bool = False) -> PolicyModel:
    return load_policy(
        model, logprob_chunk=7 if is_frugal else 1024, gradient_checkpointing=is_frugal
    )


def run(policy: PolicyModel, tensors: RowTensors) -> torch.Tensor:
    logprobs, _ = policy(tensors)
    return logprobs


def score(policy: PolicyModel, row: MicroBatch) -> torch.Tensor:
    return run(policy, row_tensors(row, device=CPU))


def compute(policy: PolicyModel, rows: Sequence[MicroBatch]) -> tuple[float, Gradients]:
    """Return the loss and all gradients, summed over rows."""
    policy.zero_grad()
    total = 0.0
    for row in rows:
        loss = surrogate(score(policy, row), row.behaviour_logprobs, row.advantages)
        loss.backward()
        total += loss.item()
    return total, gradients_of(policy)


def assert_same(ours: tuple[float, Gradients], theirs: tuple[float, Gradients]) -> None:
    """Check equality up to float32 rounding, relative to the largest entry of each gradient."""
    assert ours[0] == pytest.approx(theirs[0], rel=5e-6)
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        scale = float(np.abs(gradient).max())
        assert scale > 0, name
        np.testing.assert_allclose(ours[1][name], gradient, rtol=0, atol=5e-5 * scale)


def test_recorded_experts_are_weighted_by_the_routers_own_logits() -> None:
    logits = torch.log(torch.tensor([[1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]]))
    weights, chosen = torch.tensor([[0.4, 0.3], [0.4, 0.3]]), torch.tensor([[3, 2], [0, 1]])
    place = {"positions": torch.tensor([0]), "recorded": torch.tensor([[0, 1]])}
    same, normalised, experts = replay_choice(logits, weights, chosen, normalises=True, **place)
    assert same is logits
    torch.testing.assert_close(normalised, torch.tensor([[1 / 3, 2 / 3], [0.4, 0.3]]))
    assert experts.tolist() == [[0, 1], [0, 1]]
    _, plain, _ = replay_choice(logits, weights, chosen, normalises=False, **place)
    torch.testing.assert_close(plain, torch.tensor([[0.1, 0.2], [0.4, 0.3]]))


def test_a_recorded_expert_of_probability_0_has_finite_weights() -> None:
    logits = torch.tensor([[400.0, 0.0, -1.0]], requires_grad=True)
    _, weights, _ = replay_choice(
        logits,
        torch.ones(1, 2),
        torch.tensor([[0, 1]]),
        positions=torch.tensor([0]),
        recorded=torch.tensor([[1, 2]]),
        normalises=True,
    )
    torch.testing.assert_close(weights, torch.softmax(torch.tensor([[0.0, -1.0]]), -1))
    weights[0, 0].backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_shape_of_a_mixture_counts_only_its_routed_layers(
    models: dict[str, str], kind: str
) -> None:
    expected = MixtureShape(num_layers=2, num_experts=NUM_EXPERTS, num_chosen=NUM_CHOSEN)
    assert load(models[kind]).mixture == expected


def test_a_dense_model_has_no_mixture(tiny_models: dict[bool, str]) -> None:
    assert load(tiny_models[True]).mixture is None


@pytest.mark.parametrize("kind", KINDS)
def test_replaying_a_models_own_choice_changes_nothing(models: dict[str, str], kind: str) -> None:
    policy = load(models[kind])
    plain = load_plain(models[kind])
    samples = [
        replace(
            sample,
            experts=ExpertRecords(
                positions=np.arange(sample.num_tokens, dtype=np.int32),
                indices=record(plain, sample.token_ids.tolist()),
            ),
        )
        for sample in recorded_batch(models[kind])
    ]
    row = pack_row(weigh(samples))
    assert row.experts is not None and len(row.experts.positions) == row.num_tokens
    own = replace(row, experts=None)
    torch.testing.assert_close(score(policy, row), score(policy, own), rtol=0, atol=2e-6)
    assert_same(compute(policy, [row]), compute(policy, [own]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_frugal", [False, True])
def test_loss_and_gradients_equal_those_of_the_loop_for_every_layout(
    models: dict[str, str], kind: str, is_frugal: bool
) -> None:
    trajectories = recorded_trajectories(models[kind])
    merged, unmerged = (weigh(make(trajectories)) for make in (merged_samples, unmerged_samples))
    padded = compute_padded(models[kind], merged, normalises=NORMALISES[kind])
    policy = load(models[kind], is_frugal=is_frugal)
    tree = pack_row(merged)
    assert tree.experts is not None and tree.num_overruled_records == 0
    # Prompts, observations, last tokens and one whole turn have no records.
    assert 0.2 < len(tree.experts.positions) / tree.num_tokens < 0.8
    assert_same(compute(policy, [tree]), padded)
    many = pack_minibatch(merged, num_ranks=2, budget=60, attention_tokens=64)
    rows = [row for share in many for row in share if row.num_trained]
    assert len(rows) > 3
    layouts = {
        "flat": [pack_row(merged, share_prefixes=False)],
        "unmerged": [pack_row(unmerged)],
        "unmerged and flat": [pack_row(unmerged, share_prefixes=False)],
        "another order": [pack_row(list(reversed(merged)))],
        "many rows": rows,
    }
    for layout in layouts.values():
        assert_same(compute(policy, layout), padded)


def test_the_records_of_the_sampler_change_the_scores(models: dict[str, str]) -> None:
    for kind in KINDS:
        policy = load(models[kind])
        row = pack_row(weigh(recorded_batch(models[kind])))
        with torch.no_grad():
            difference = score(policy, row) - score(policy, replace(row, experts=None))
        assert float(difference.abs().max()) > 1e-2
        assert float(difference.abs().median()) > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_without_records_the_model_routes_by_itself(models: dict[str, str], kind: str) -> None:
    policy, plain = load(models[kind]), load_plain(models[kind])
    sample = recorded_batch(models[kind])[0].without_experts()
    tokens = torch.from_numpy(sample.token_ids.astype(np.int64))
    logits = plain(tokens[None], use_cache=False).logits[0, :-1] / TEMPERATURE
    expected = torch.log_softmax(logits, -1).gather(-1, tokens[1:, None])[:, 0]
    found = score(policy, pack_row(weigh([sample])))
    torch.testing.assert_close(found, expected[sample.mask[1:] == 1], rtol=0, atol=2e-6)


def test_a_token_before_the_first_record_is_scored_as_without_records(
    models: dict[str, str],
) -> None:
    policy = load(models["qwen3"])
    row = pack_row(weigh(recorded_batch(models["qwen3"])[:1]))
    assert row.experts is not None
    first = int(row.experts.positions[0])
    before = torch.from_numpy(row.loss_positions < first)
    with torch.no_grad():
        found, plain = score(policy, row), score(policy, replace(row, experts=None))
    assert before.any() and not before.all()
    torch.testing.assert_close(found[before], plain[before], rtol=0, atol=2e-6)
    assert float((found - plain)[~before].abs().median()) > 1e-4


@pytest.mark.parametrize("is_frugal", [False, True])
def test_overlapping_passes_keep_their_own_records(models: dict[str, str], is_frugal: bool) -> None:
    policy = load(models["mixtral"], is_frugal=is_frugal)
    row = pack_row(weigh(recorded_batch(models["mixtral"])))
    other = pack_row(weigh(recorded_batch(models["mixtral"])[2:5]))
    rows = [row, replace(row, experts=None), other]
    apart = compute(policy, rows)
    policy.zero_grad()
    losses = [surrogate(score(policy, r), r.behaviour_logprobs, r.advantages) for r in rows]
    with torch.no_grad():
        # A forward pass for scores happens between a forward and its backward pass.
        score(policy, replace(other, experts=None))
    together = torch.stack(losses).sum()
    together.backward()
    assert_same((together.item(), gradients_of(policy)), apart)


def test_two_models_in_one_process_share_no_records(models: dict[str, str]) -> None:
    policy, reference = load(models["qwen3"]), load(models["qwen3"])
    row = pack_row(weigh(recorded_batch(models["qwen3"])))
    with torch.no_grad():
        alone = score(reference, replace(row, experts=None))
        replayed = score(policy, row)
        again = score(reference, replace(row, experts=None))
    torch.testing.assert_close(again, alone, rtol=0, atol=0)
    assert float((replayed - again).abs().max()) > 1e-3


def test_the_router_of_the_sampler_differs_from_the_trainers(models: dict[str, str]) -> None:
    for kind in KINDS:
        tokens = recorded_batch(models[kind])[0].token_ids.tolist()
        plain, sampler = load_plain(models[kind]), perturbed(models[kind])
        assert len(routers_of(plain)) == 2
        own, other = (np.sort(record(each, tokens), -1) for each in (plain, sampler))
        assert 0.1 < (own != other).any(-1).mean() < 0.95
