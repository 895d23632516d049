"""Layers that are gathered in bfloat16 for their products, over ranks against one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from support.parallel_training import Job, Trained, joined, make_trainer, near_policy, train
from support.rank_processes import RankContext, RankPool
from support.rollout_checks import load_trainer_model, rounded_copy
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch
from support.updates import update_whole
from torch.distributed.fsdp import FSDPModule

from rolemesh.engine.hardware.devices import device_of
from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
from rolemesh.engine.parallel.data_parallel import layers_of
from rolemesh.engine.specs import ModelSpec, OptimizerSpec, PpoPolicyLossSpec, PpoValueLossSpec
from rolemesh.engine.train.trainer import Trainer

ROUNDING = 2.0**-8
"""bfloat16 has 8 bits: a rounding moves a number by at most half of this, relative."""
SHARES_TOLERANCE = ROUNDING
"""Relative, of the norm of a gradient, where ranks cut rows: one process rounds the gradient of
each micro-batch once, and so does each rank; the sums are float32."""
SLICES_TOLERANCE = 1.5
"""Times the distance of one process from float32, where ranks cut products: each slice's part is
rounded and so is their sum, so that hidden states take other roundings, as many as one process has,
and independent ones would be sqrt(2) apart."""
METRIC_TOLERANCE = 2 * ROUNDING
"""Absolute: of losses and ratios around 1."""

# torch 2.12 and older have it by another name.
NAME_OF_REDUCE = next(
    one for one in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, one)
)
"""What FSDP2 calls to sum gradients."""
FSDP = TrainLayout(dp=2, fsdp=2)
MIXED = TrainLayout(tp=2, pp=2, dp=2, fsdp=2)
NARROW = {"compute_dtype": "bfloat16", "activations": "bfloat16"}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """A policy of bfloat16 layers, and a critic under autocast, of a folder as they come.

    Its weights are bfloat16: otherwise norms would be rounded where they are gathered alone.
    """
    made = tmp_path_factory.mktemp("llama")
    write_tiny_llama(made / "float32", seed=4, tied=True, num_layers=2)
    folder = made / "model"
    rounded_copy(load_trainer_model(made / "float32")).save_pretrained(folder)
    batch = token_batch()
    trainer = Trainer.policy(ModelSpec(path=folder, compute_dtype="float32"), OptimizerSpec())
    scored = trainer.compute_logprobs(batch, temperature=1.0)["logprobs"]
    return {
        "policy": Job(folder, near_policy(batch, scored), PpoPolicyLossSpec(), model=NARROW),
        "critic": Job(
            *(folder, batch, PpoValueLossSpec(clip=None)),
            kind="critic",
            model={"compute_dtype": "bfloat16"},
        ),
    }


@pytest.fixture(scope="module")
def alone(rank_pool: RankPool, jobs: dict[str, Job]) -> dict[str, Trained]:
    return {kind: joined(rank_pool.run(train, 1, job), TrainLayout()) for kind, job in jobs.items()}


def _distance(found: Trained, expected: Trained) -> dict[str, float]:
    """Of the first step's gradients: later ones are gradients of weights that already differ."""
    return {
        name: float((found.gradients[0][name] - gradient).norm() / gradient.norm())
        for name, gradient in expected.gradients[0].items()
    }


@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_ranks_that_cut_weights_train_as_one_process(
    rank_pool: RankPool, jobs: dict[str, Job], alone: dict[str, Trained], kind: str
) -> None:
    found = joined(rank_pool.run(train, 2, replace(jobs[kind], layout=FSDP)), FSDP)
    for name, distance in _distance(found, alone[kind]).items():
        assert distance < SHARES_TOLERANCE, name
    for metric in ("loss", "grad_norm"):
        assert found.metrics[metric] == pytest.approx(
            alone[kind].metrics[metric], rel=METRIC_TOLERANCE, abs=METRIC_TOLERANCE
        )


@pytest.mark.parametrize(
    "layout",
    [TrainLayout(tp=2), pytest.param(MIXED, marks=pytest.mark.slow)],
    ids=["tp2", "tp2-pp2-fsdp2"],
)
def test_slices_of_narrow_layers_are_as_far_from_float32_as_one_process(
    rank_pool: RankPool, jobs: dict[str, Job], alone: dict[str, Trained], layout: TrainLayout
) -> None:
    job = jobs["policy"]
    wide = joined(
        rank_pool.run(train, 1, replace(job, model={"compute_dtype": "float32"})), TrainLayout()
    )
    found = joined(rank_pool.run(train, layout.world_size, replace(job, layout=layout)), layout)
    floor = _distance(alone["policy"], wide)
    for name, distance in _distance(found, alone["policy"]).items():
        assert distance < SLICES_TOLERANCE * floor[name], name


def test_layers_are_gathered_in_bfloat16_and_their_gradients_summed_in_float32(
    rank_pool: RankPool, jobs: dict[str, Job]
) -> None:
    # A CPU that emulates products of bfloat16 makes a critic's of float32, and of its own weights.
    critics = "torch.bfloat16" if device_of("cpu").multiplies_bfloat16 else "torch.float32"
    gathered = {"policy": "torch.bfloat16", "critic": critics}
    for kind, job in jobs.items():
        for seen in rank_pool.run(_types, 2, replace(job, layout=FSDP)):
            assert seen["layers"] == {gathered[kind]}, kind
            # A head adds its gradient up over chunks.
            assert seen["outside"] == {"torch.float32"}, kind
            assert seen["reduced"] == {"torch.float32"}, kind
            assert seen["parts"] == {"torch.float32"}, kind


def test_a_float32_model_is_gathered_as_it_is(rank_pool: RankPool, jobs: dict[str, Job]) -> None:
    job = replace(jobs["policy"], layout=FSDP, model={"compute_dtype": "float32"})
    for seen in rank_pool.run(_types, 2, job):
        assert seen["layers"] == {"torch.float32"}


def test_slices_add_up_narrow_activations_in_their_own_type(
    rank_pool: RankPool, jobs: dict[str, Job]
) -> None:
    layout = TrainLayout(tp=2)
    wide = {"compute_dtype": "bfloat16"}
    for model, expected in ((NARROW, "torch.bfloat16"), (wide, "torch.float32")):
        job = replace(jobs["policy"], layout=layout, model=model)
        for sent in rank_pool.run(_sent, 2, job):
            assert sent == {expected}


def _types(at: RankContext, job: Job) -> dict[str, set[str]]:
    """Types in an update: of weights while layers compute, of what is reduced, and of parts."""
    seen: dict[str, set[str]] = {"layers": set(), "outside": set(), "reduced": set()}
    with at.connect(HybridLayout(job.layout)) as mesh:
        trainer = make_trainer(job, at, mesh)
        stage = trainer.rank_model

        def look(layer: Any, _: Any) -> None:
            seen["layers"] |= {str(weight.dtype) for weight in layer.parameters()}
            norm = trainer.model.lm.base_model.norm.weight
            seen["outside"].add(str(norm.dtype))

        for layer in layers_of(stage):
            assert isinstance(layer, FSDPModule)
            # Behind FSDP's own hook, which gathers.
            cast(Any, layer).mlp.register_forward_pre_hook(lambda _, a, one=layer: look(one, a))
        reduce = getattr(dist, NAME_OF_REDUCE)

        def noting(*arguments: Any, **options: Any) -> Any:
            tensors = [*arguments, *options.values()]
            seen["reduced"] |= {str(t.dtype) for t in tensors if isinstance(t, torch.Tensor)}
            return reduce(*arguments, **options)

        setattr(dist, NAME_OF_REDUCE, noting)
        try:
            update_whole(trainer, job.batch, job.loss, epochs=1, mini_batch_rows=6, seed=5)
        finally:
            setattr(dist, NAME_OF_REDUCE, reduce)
        seen["parts"] = {str(weight.dtype) for _, weight in trainer.named_weights()}
        return seen


def _sent(at: RankContext, job: Job) -> set[str]:
    """Types of the activations that slices sum while they score."""
    types: set[str] = set()
    with at.connect(HybridLayout(job.layout)) as mesh:
        trainer = make_trainer(job, at, mesh)
        width = trainer.model.config.hidden_size
        reduce = dist.all_reduce

        def noting(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            # Embeddings, whose sums are exact, are looked up before any layer.
            if tensor.dim() == 3 and tensor.shape[-1] == width and layers_began:
                types.add(str(tensor.dtype))
            return reduce(tensor, *arguments, **options)

        layers_began: list[bool] = []
        layers_of(trainer.rank_model)[0].register_forward_pre_hook(
            lambda *_: layers_began.append(True)
        )
        trainer.rank_model.register_forward_pre_hook(lambda *_: layers_began.clear())
        dist.all_reduce = noting
        try:
            trainer.compute_logprobs(job.batch, temperature=1.0)
        finally:
            dist.all_reduce = reduce
    return types
