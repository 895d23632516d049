"""Routers of mixtures: what they choose is counted and replayed, and their loads are evened out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.family_cases import CASES, case_config
from support.parallel_training import (
    Job,
    assert_agree,
    joined,
    near_policy,
    train,
)
from support.rank_processes import RankContext, RankPool
from support.rollout_checks import set_stop_tokens, short_requests
from support.slow_cases import mostly_slow
from support.tiny_families import write_tiny_decoder
from support.token_batches import token_batch
from support.updates import update_whole
from transformers import AutoModelForCausalLM

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.layout.ranks import TrainLayout
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.rollout.episodes.episode import routes_so_far
from rolemesh.engine.rollout.factory import make_backend
from rolemesh.engine.rollout.requests import RolloutRequest
from rolemesh.engine.specs import (
    HfSpec,
    ModelSpec,
    OptimizerSpec,
    PpoPolicyLossSpec,
    SamplingSpec,
    VllmSpec,
)
from rolemesh.engine.specs.columns import NO_ROUTE, ROUTES
from rolemesh.engine.train.plan import UpdatePlan
from rolemesh.engine.train.trainer import Trainer

FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "glm4_moe")
VOCABULARY = 100
LOSS = PpoPolicyLossSpec()
ROUNDING = 5e-6
"""Of log-probs of one model in two programs that sum in another order."""
NOISE = {"glm4_moe": 4e-3}
"""Of the router's weights, 1e-3 where it is not named: other experts are then chosen here and
there. The bias of GLM4-MoE decides more often than its scores."""


def _folder(directory: Path, family: str, **more: Any) -> Path:
    config = {**case_config(family), **more}
    return write_tiny_decoder(directory, family, vocab_size=VOCABULARY, **config)


def _spec(folder: Path, **more: Any) -> ModelSpec:
    fields = {"compute_dtype": "float32", "micro_batch_tokens": 24, **more}
    return ModelSpec.model_validate({"path": folder, **fields})


def _trainer(folder: Path, **more: Any) -> Trainer:
    return Trainer.policy(_spec(folder, **more), OptimizerSpec(learning_rate=1e-3))


def _batch(trainer: Trainer) -> Experience:
    batch = token_batch(vocab_size=VOCABULARY)
    return near_policy(batch, trainer.compute_logprobs(batch, temperature=1.0)["logprobs"])


def _oracle_routes(folder: Path, batch: Experience) -> list[torch.Tensor]:
    """Choices of transformers' model for each row, int64 [T, L, K], whatever else is computed."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    seen: list[torch.Tensor] = []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.gate.register_forward_hook(lambda _, args, out: seen.append(out[2]))
    found = []
    for row in batch["tokens"].rows():
        seen.clear()
        with torch.no_grad():
            model(row[None])
        found.append(torch.stack(seen, dim=1))
    return found


# --- what routers say -----------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_given_experts_are_those_that_the_router_itself_gives(
    tmp_path: Path, family: str
) -> None:
    model = CausalLm(_spec(_folder(tmp_path, family)))
    assert model.routers is not None
    for layer in model.lm.base_model.layers:
        if hasattr(layer.mlp, "experts"):
            logits, weights, chosen = layer.mlp.gate(torch.randn(7, 32))
            assert torch.equal(model.routers.weights_of(logits, chosen), weights)


@pytest.mark.parametrize(("recompute", "packs"), [("none", True), ("full", True), ("none", False)])
def test_choices_for_completion_tokens_are_counted_once(
    tmp_path: Path, recompute: str, packs: bool
) -> None:
    """Whatever rows share, whatever is recomputed, and in padded rows as in packed ones."""
    folder = _folder(tmp_path, "qwen3_moe")
    trainer = _trainer(folder, recompute=recompute)
    if not packs:
        trainer.model.packing = None
        trainer.model.lm.set_attn_implementation("sdpa")
    batch = _batch(trainer)
    routers = trainer.model.routers
    assert routers is not None
    lengths = batch["tokens"].lengths().tolist()
    plan = UpdatePlan.of_update(
        lengths, trainer.mesh.dp, epochs=1, mini_batch_rows=len(lengths), seed=1
    )
    trainer.forward_backward(batch, LOSS, plan)
    expected = torch.zeros(2, 5, dtype=torch.float64)
    prompts = batch["prompt_lengths"].values.tolist()
    for routes, prompt in zip(_oracle_routes(folder, batch), prompts, strict=True):
        for layer in range(2):
            expected[layer] += torch.bincount(routes[prompt - 1 : -1, layer].flatten(), minlength=5)
    assert torch.equal(torch.stack(routers.loads(trainer.mesh.dp)), expected)
    # Scoring counts nothing, nor does what was dropped.
    trainer.compute_logprobs(batch, temperature=1.0)
    trainer.forward_backward(batch, LOSS, plan)
    trainer.drop_gradients()
    assert not any(load.any() for load in routers.loads(trainer.mesh.dp))


def test_choices_add_up_over_an_update_and_are_taken_once(tmp_path: Path) -> None:
    """Of an update in three steps they are those of the three; what fails leaves none."""
    trainer = _trainer(_folder(tmp_path, "qwen3_moe"))
    batch, routers = _batch(trainer), trainer.model.routers
    assert routers is not None
    assert trainer.take_expert_loads() == []
    given, seen = routers.loads, []
    routers.loads = lambda group: seen.append(given(group)) or seen[-1]  # type: ignore[assignment, func-returns-value]
    update_whole(trainer, batch, LOSS, epochs=1, mini_batch_rows=3, seed=5)
    assert len(seen) == 3
    expected = [sum(step[layer] for step in seen).tolist() for layer in range(2)]
    found = trainer.take_expert_loads()
    # The layer between them is a dense one.
    assert [one.layer for one in found] == [0, 2]
    assert [one.choices for one in found] == expected
    assert all(type(number) is int for one in found for number in one.choices)
    assert trainer.take_expert_loads() == []

    def fail(*_: Any) -> Any:
        raise RuntimeError("no memory")

    # The first step of the update is made, the second one fails.
    optim_step = trainer.optim_step
    steps = iter([optim_step, fail])
    trainer.optim_step = lambda *given: next(steps)(*given)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no memory"):
        update_whole(trainer, batch, LOSS, epochs=1, mini_batch_rows=3, seed=5)
    trainer.optim_step = optim_step  # type: ignore[method-assign]
    update_whole(trainer, batch, LOSS, epochs=1, mini_batch_rows=100, seed=5)
    total = [sum(one.choices) for one in trainer.take_expert_loads()]
    assert total == [sum(one.choices) for one in found]


def test_a_dense_model_tells_no_loads(tmp_path: Path) -> None:
    trainer = _trainer(_folder(tmp_path, "qwen3"))
    update_whole(trainer, _batch(trainer), LOSS, epochs=1, mini_batch_rows=100, seed=5)
    assert trainer.take_expert_loads() == []


# --- balancing ------------------------------------------------------------------------------


def test_a_step_moves_each_bias_towards_even_loads(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "glm4_moe")
    trainer = _trainer(folder, balancing={"rate": 0.125})
    batch = _batch(trainer)
    routers = trainer.model.routers
    assert routers is not None
    before = [bias.clone() for bias in routers.biases()]
    loads: list[torch.Tensor] = []
    given = routers.loads
    routers.loads = lambda group: loads.extend(given(group)) or loads  # type: ignore[assignment]
    metrics = update_whole(trainer, batch, LOSS, epochs=1, mini_batch_rows=100, seed=5)
    assert len(loads) == len(before) == 2
    for bias, old, load in zip(routers.biases(), before, loads, strict=True):
        assert bool((load > load.mean()).any())
        assert bool((load < load.mean()).any())
        torch.testing.assert_close(bias, old + 0.125 * torch.sign(load.mean() - load).float())
    ratios = [float(load.max() / load.mean()) for load in loads]
    assert metrics["experts/load_ratio"] == pytest.approx(sum(ratios) / 2)
    assert metrics["experts/load_ratio_max"] == pytest.approx(max(ratios))
    assert 0 < metrics["experts/load_entropy"] < 1


def test_loads_become_even(tmp_path: Path) -> None:
    """The bias alone does it: the router's own weights barely move."""
    folder = _folder(tmp_path, "glm4_moe", n_group=1, topk_group=1)
    trainer = _trainer(folder, balancing={"rate": 0.05})
    batch = _batch(trainer)
    found = [
        update_whole(trainer, batch, LOSS, epochs=1, mini_batch_rows=100, seed=5) for _ in range(16)
    ]
    assert found[0]["experts/load_ratio"] > 1.8
    assert found[-1]["experts/load_ratio"] < 1.5
    assert found[-1]["experts/load_entropy"] > found[0]["experts/load_entropy"]


@pytest.mark.parametrize(
    ("family", "more", "words"),
    [
        ("qwen3_moe", {}, "router of this model has no bias of experts"),
        ("qwen3", {}, "router of this model has no bias of experts"),
        ("glm4_moe", {"adapter": {"rank": 2}}, "given beside model.adapter"),
    ],
)
def test_balancing_is_refused_where_there_is_no_bias_to_move(
    tmp_path: Path, family: str, more: dict[str, Any], words: str
) -> None:
    folder = _folder(tmp_path, family)
    with pytest.raises(ValueError, match=words):
        _trainer(folder, balancing={}, **more)


# --- replay ---------------------------------------------------------------------------------


def _with_routes(batch: Experience, routes: list[torch.Tensor]) -> Experience:
    flat = torch.cat([one.flatten(1) for one in routes]).to(torch.uint8)
    column = Column(ColumnKind.SEQUENCE, flat, batch["tokens"].offsets)
    return batch | Experience({ROUTES: column})


def _add_noise(trainer: Trainer) -> None:
    """Has the router choose otherwise than the folder's, here and there."""
    assert trainer.model.shape is not None
    noise = NOISE.get(trainer.model.shape.family, 1e-3)
    generator = torch.Generator().manual_seed(3)
    for name, weight in trainer.named_weights():
        if name.endswith("mlp.gate.weight"):
            weight += noise * torch.randn(weight.shape, generator=generator)


@pytest.mark.parametrize(
    ("family", "shares"),
    [*((family, "auto") for family in FAMILIES), ("qwen3_moe", "never"), ("glm4_moe", "padded")],
)
def test_own_routes_change_nothing(tmp_path: Path, family: str, shares: str) -> None:
    folder = _folder(tmp_path, family)
    if shares == "padded":
        trainer = _trainer(folder)
        trainer.model.packing = None
        trainer.model.lm.set_attn_implementation("sdpa")
    else:
        trainer = _trainer(folder, share_prefixes=shares)
    batch = _batch(trainer)
    replayed = _with_routes(batch, _oracle_routes(folder, batch))
    scores = [
        trainer.compute_logprobs(one, temperature=1.0)["logprobs"].values
        for one in (batch, replayed)
    ]
    torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=ROUNDING)


def _change(routes: list[torch.Tensor], how: str) -> list[torch.Tensor]:
    if how == "by a layer":
        return [one.roll(1, 1) for one in routes]
    if how == "by a token":
        return [one.roll(1, 0) for one in routes]
    return [torch.full_like(one, NO_ROUTE) for one in routes]


@pytest.mark.parametrize("how", ["by a layer", "by a token", "to unknown"])
def test_shifted_routes_show(tmp_path: Path, how: str) -> None:
    """What is replayed is seen in log-probs, but for routes that are not known."""
    folder = _folder(tmp_path, "qwen3_moe")
    trainer = _trainer(folder)
    batch = _batch(trainer)
    shifted = _with_routes(batch, _change(_oracle_routes(folder, batch), how))
    scores = [
        trainer.compute_logprobs(one, temperature=1.0)["logprobs"].values
        for one in (batch, shifted)
    ]
    distance = float((scores[0] - scores[1]).abs().max())
    assert distance == 0 if how == "to unknown" else distance > 1e-2


def test_routes_of_another_model_are_refused(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "mixture", "qwen3_moe")
    trainer = _trainer(folder)
    batch = _batch(trainer)
    routes = _oracle_routes(folder, batch)
    wrong = _with_routes(batch, [one[:, :1] for one in routes])
    with pytest.raises(ValueError, match=r"'routes' has 2 numbers .* routes of this model have 4"):
        trainer.compute_logprobs(wrong, temperature=1.0)
    dense = _trainer(_folder(tmp_path / "dense", "qwen3"))
    with pytest.raises(ValueError, match=r"'routes' has 4 numbers .* this model have no experts"):
        dense.compute_logprobs(_with_routes(batch, routes), temperature=1.0)


LAYOUTS: dict[str, tuple[TrainLayout, dict[str, Any]]] = {
    "pp2": (TrainLayout(pp=2), {}),
    "tokens shared": (TrainLayout(tp=2), {"sequence_parallel": True}),
    "ep2 fsdp4": (TrainLayout(dp=4, fsdp=4, ep=2), {}),
    "cp2 ep4, recomputed": (TrainLayout(dp=4, ep=4, cp=2), {"recompute": "full"}),
    "cp2, tokens shared": (TrainLayout(tp=2, dp=2, cp=2), {"sequence_parallel": True}),
    "all ways, recomputed": (TrainLayout(tp=2, pp=2, dp=2, fsdp=2, ep=2), {"recompute": "full"}),
}
LAYERS = {"qwen3_moe": [0, 2], "glm4_moe": [1, 2]}
"""Numbers of the layers with experts."""
PAIRS = [(family, name) for family in ("qwen3_moe", "glm4_moe") for name in LAYOUTS]
QUICK = [
    *(("qwen3_moe", "all ways, recomputed"), ("glm4_moe", "pp2")),
    *(("qwen3_moe", "cp2, tokens shared"), ("glm4_moe", "cp2 ep4, recomputed")),
]


@pytest.mark.parametrize(
    ("family", "name"),
    mostly_slow([number for number, pair in enumerate(PAIRS) if pair in QUICK], PAIRS),
)
def test_ranks_replay_and_balance_as_one(
    rank_pool: RankPool, tmp_path: Path, family: str, name: str
) -> None:
    """With routes that are not those of the trained model; loads, and biases, come out alike."""
    number = "n_routed_experts" if family == "glm4_moe" else "num_experts"
    folder = _folder(tmp_path / "model", family, **{number: 8})
    sampled = _folder(tmp_path / "sampled", family, seed=1, **{number: 8})
    trainer = _trainer(folder)
    batch = _batch(trainer)
    replayed = _with_routes(batch, _oracle_routes(sampled, batch))
    layout, fields = LAYOUTS[name]
    both = {"balancing": {"rate": 0.01}} if family == "glm4_moe" else {}
    job = Job(folder, replayed, LOSS, model=both)
    alone = joined(rank_pool.run(train, 1, job), TrainLayout())
    assert "experts/load_ratio" in alone.metrics
    # Three mini-batches; numbers leave dense layers out. Each token chooses two experts.
    assert [one.layer for one in alone.expert_loads] == LAYERS[family]
    lengths = batch["tokens"].lengths() - batch["prompt_lengths"].values
    assert [sum(one.choices) for one in alone.expert_loads] == [2 * int(lengths.sum())] * 2
    spread = replace(job, layout=layout, model={**both, **fields})
    assert_agree(joined(rank_pool.run(train, layout.world_size, spread), layout), alone)


# --- samplers -------------------------------------------------------------------------------


def _replay_gaps(folder: Path, sampled: list[Any], requests: list[Any]) -> dict[str, float]:
    """Largest gap of log-probs to the sampler's, of a trainer whose router is another one."""
    rows = {one.row: one for one in sampled}
    tokens = [[*one.prompt_tokens, *rows[one.row].completion_tokens] for one in requests]
    batch = Experience(
        {
            "tokens": Column.ragged(ColumnKind.SEQUENCE, tokens, torch.int64),
            "prompt_lengths": Column(
                ColumnKind.ROW, torch.tensor([len(one.prompt_tokens) for one in requests])
            ),
        }
    )
    logprobs = torch.cat([torch.tensor(rows[one.row].logprobs) for one in requests])
    routes = [torch.from_numpy(rows[one.row].routes) for one in requests]
    trainer = _trainer(folder)
    found = {}
    for noise in ("same router", "noisy router"):
        for name, one in {"alone": batch, "replayed": _with_routes(batch, routes)}.items():
            scored = trainer.compute_logprobs(one, temperature=1.0)["logprobs"].values
            found[f"{noise}, {name}"] = float((scored - logprobs).abs().max())
        _add_noise(trainer)
    return found


def _of_one_prompt(first_row: int) -> list[RolloutRequest]:
    """Samples of a prompt of more than one of vLLM's blocks, and of one that begins like it."""
    prompt = [3 + 7 * place % (VOCABULARY - 3) for place in range(50)]
    prompts = [prompt, prompt, [*prompt[:40], 5, 6], prompt]
    return [
        RolloutRequest(row=first_row + number, prompt_tokens=one, seed=number)
        for number, one in enumerate(prompts)
    ]


def sample_with_routes(at: RankContext, folder: Path, kind: str) -> tuple[dict[str, float], float]:
    """Gaps, and the share of known routes that transformers' model makes itself."""
    requests = [*short_requests(VOCABULARY), *_of_one_prompt(10)]
    fields: dict[str, Any] = {"dtype": "float32", "max_model_len": 96, "max_num_seqs": 4}
    spec: HfSpec | VllmSpec
    if kind == "hf":
        spec = HfSpec(replay_routes=True, **fields)
    else:
        spec = VllmSpec(replay_routes=True, **fields)
    backend = make_backend(spec, folder)
    trainer = _trainer(folder)
    backend.update_weights(trainer.named_weights(), 0)
    sampled = list(backend.generate(requests, SamplingSpec(max_new_tokens=24)))
    backend.close()
    rows = {one.row: one for one in sampled}
    batch = Experience(
        {
            "tokens": Column.ragged(
                ColumnKind.SEQUENCE,
                [[*one.prompt_tokens, *rows[one.row].completion_tokens] for one in requests],
                torch.int64,
            )
        }
    )
    same = total = 0
    for request, expected in zip(requests, _oracle_routes(folder, batch), strict=True):
        found = torch.from_numpy(rows[request.row].routes)
        assert found.shape == expected.flatten(1).shape
        assert bool((found[-1] == NO_ROUTE).all())
        known = found[:-1].view(-1, *expected.shape[1:]).long()
        assert int(known.max()) < NO_ROUTE
        equal = (known.sort(-1).values == expected[:-1].sort(-1).values).all(-1)
        same, total = same + int(equal.sum()), total + equal.numel()
    return _replay_gaps(folder, sampled, requests), same / total


def _check_sampler(found: tuple[dict[str, float], float]) -> None:
    gaps, equal = found
    assert equal > 0.999, equal
    assert gaps["same router, alone"] < 1e-4
    assert gaps["same router, replayed"] < 1e-4
    # The router's noise moves the weights of experts, too, which no replay undoes.
    assert gaps["noisy router, replayed"] < gaps["noisy router, alone"] / 3, gaps


@pytest.mark.parametrize(
    "family",
    [*FAMILIES[1::2], *(pytest.param(one, marks=pytest.mark.slow) for one in FAMILIES[::2])],
)
def test_the_sampler_hf_keeps_routes(rank_pool: RankPool, tmp_path: Path, family: str) -> None:
    folder = _folder(tmp_path, family, eos_token_id=2, max_position_embeddings=128)
    (found,) = rank_pool.run(sample_with_routes, 1, folder, "hf")
    _check_sampler(found)


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=pytest.mark.slow) for one in FAMILIES[2:]] + ["qwen3_moe"]
)
def test_the_sampler_vllm_keeps_routes(tmp_path: Path, family: str) -> None:
    sizes = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 96}
    sizes["max_position_embeddings"] = 128
    if "moe_intermediate_size" in CASES[family][1]:
        sizes["moe_intermediate_size"] = 64
    folder = _folder(tmp_path, family, eos_token_id=2, initializer_range=0.08, **sizes)
    set_stop_tokens(folder, (2, 3))
    with RankPool(1) as pool:
        (found,) = pool.run(sample_with_routes, 1, folder, "vllm", timeout_s=300.0)
    _check_sampler(found)


def test_a_turn_leaves_routes_by_which_tokens_were_sampled() -> None:
    first = np.array([[1, 2], [3, 4], [NO_ROUTE, NO_ROUTE]], dtype=np.uint8)
    turn = np.array([[9, 9], [9, 9], [5, 6], [7, 8], [NO_ROUTE, NO_ROUTE]], dtype=np.uint8)
    found = routes_so_far(first, turn)
    assert found is not None
    assert found.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8], [NO_ROUTE, NO_ROUTE]]
    assert routes_so_far(None, turn) is turn


def test_routes_are_refused_where_none_can_be_kept(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "qwen3", eos_token_id=2)
    with pytest.raises(ValueError, match="replay_routes is true, but the model has no experts"):
        make_backend(HfSpec(replay_routes=True, max_model_len=32), folder)
