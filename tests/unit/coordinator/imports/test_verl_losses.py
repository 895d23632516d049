"""Losses, corrections and teachers of verl as those of a recipe."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.estimator_oracles import pass_at_k
from support.imports import PREFIX, of_verl, recipe_of, tree_of

from rolemesh.coordinator.imports.source import ImportedError

ACTOR = f"{PREFIX}.actor"
MODE = f"{ACTOR}.policy_loss.loss_mode"
CORRECTION = "algorithm.rollout_correction"
LOSS = "distillation.distillation_loss"
TEACHER = ("distillation.enabled=True", "distillation.teacher_models.teacher_model.model_path=/t")
COVARIANCE = {"aggregation": "token_mean", "covariance_share": 0.0002}


@pytest.mark.parametrize(
    ("mode", "given", "kind", "loss"),
    [
        (
            *("sapo", f"{ACTOR}.tau_pos=2.0", "sapo"),
            {"aggregation": "seq_mean_token_mean", "gate_positive": 2.0, "gate_negative": 1.05},
        ),
        (
            *("geo_mean", f"{ACTOR}.clip_ratio_high=0.3", "gmpo"),
            {"clip_low": 0.2, "clip_high": 0.3, "aggregation": "seq_mean_token_mean"},
        ),
        (
            *("dppo_tv", f"{ACTOR}.clip_ratio_low=0.1", "dppo"),
            {
                **{"divergence": "tv", "divergence_low": 0.1, "divergence_high": 0.2},
                "aggregation": "token_mean",
            },
        ),
        (
            *("dppo_kl", f"{ACTOR}.clip_ratio_high=0.05", "dppo"),
            {
                **{"divergence": "kl", "divergence_low": 0.2, "divergence_high": 0.05},
                "aggregation": "token_mean",
            },
        ),
        (
            *("clip_cov", f"{ACTOR}.policy_loss.clip_cov_lb=0.5", "clip_cov"),
            {
                **{"clip_low": 0.2, "clip_high": 0.2, "covariance_low": 0.5},
                **{"covariance_high": 5.0, **COVARIANCE},
            },
        ),
        (
            *("kl_cov", f"{ACTOR}.policy_loss.kl_cov_ratio=0.002", "kl_cov"),
            {**COVARIANCE, "covariance_share": 0.002, "penalty_coefficient": 0.1},
        ),
        (
            *("gspo", f"{ACTOR}.clip_ratio_low=0.003", "gspo"),
            {"clip_low": 0.003, "clip_high": 0.2, "aggregation": "token_mean"},
        ),
        (
            *("gpg", f"{ACTOR}.entropy_coeff=0.1", "grpo"),
            {"type": "reinforce", "entropy_coefficient": 0.1, "aggregation": "token_mean"},
        ),
    ],
    ids=["sapo", "geo_mean", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov", "gspo", "gpg"],
)
def test_losses_with_verls_numbers(mode: str, given: str, kind: str, loss: dict[str, Any]) -> None:
    made = of_verl(f"{MODE}={mode}", given)
    algorithm = tree_of(made)["algorithm"]
    assert algorithm["type"] == recipe_of(made).algorithm.type == kind
    assert algorithm["policy_loss"] == loss
    assert made.lost == {}


def test_numbers_that_a_loss_does_not_read_are_comments() -> None:
    made = of_verl(
        *(f"{MODE}=kl_cov", f"{ACTOR}.clip_ratio_low=0.1", f"{ACTOR}.clip_ratio_c=3.0"),
        *(f"{ACTOR}.tau_pos=1.5", f"{ACTOR}.tau_neg=1.05"),
    )
    assert set(made.lost) == {f"{ACTOR}.clip_ratio_low", f"{ACTOR}.tau_pos"}
    mean = of_verl(f"{MODE}=sapo", f"{ACTOR}.loss_agg_mode=token-mean")
    assert "mean of rows' means" in mean.lost[f"{ACTOR}.loss_agg_mode"]
    assert "clip_ratio_c" in of_verl(f"{MODE}=dppo_tv").text


def test_an_estimator_and_a_loss_go_together_as_in_verl() -> None:
    rloo = recipe_of(of_verl("algorithm.adv_estimator=rloo", f"{MODE}=sapo")).algorithm
    assert (rloo.type, rloo.parts.policy_loss.type) == ("rloo", "sapo")
    both = of_verl(
        *("algorithm.adv_estimator=rloo", f"{MODE}=gspo", "+algorithm.filter_groups.enable=True")
    )
    dapo = recipe_of(both).algorithm
    parts = dapo.parts
    assert (dapo.type, parts.advantages.type, parts.policy_loss.type) == ("dapo", "rloo", "gspo")


def test_parts_of_a_reward_are_normalised_apart() -> None:
    keys = "algorithm.gdpo_reward_keys=[form,Right]"
    made = of_verl(
        *("algorithm.adv_estimator=gdpo", keys, "algorithm.gdpo_reward_weights=[1,0.5]"),
        *("algorithm.use_kl_in_reward=True", "custom_reward_function.path=score.py"),
    )
    algorithm = recipe_of(made).algorithm
    assert algorithm.type == "gdpo"
    assert algorithm.parts.advantages.weights == {"form": 1.0, "right": 0.5}
    assert "reward" in made.missing
    # verl gives these rewards as they came to the estimator, too.
    assert "as they came" in made.lost["algorithm.use_kl_in_reward"]
    assert "sources of their own" in made.lost["reward.custom_reward_function.path"]


@pytest.mark.parametrize(
    "scores", [[1.0, 0.0, 0.0, 0.0], [0.3, -0.2, 0.9, 0.1], [1.0, 1.0, 0.0, 0.0]]
)
def test_the_best_of_a_group_counts_as_the_import_says(scores: list[float]) -> None:
    made = of_verl("algorithm.adv_estimator=grpo_passk", f"{PREFIX}.rollout.n={len(scores)}")
    spec = recipe_of(made).algorithm.parts.advantages
    second, best = sorted(scores)[-2:]
    verls = [best - second if score == best else 0.0 for score in scores]
    if best == second:
        verls = [0.0] * len(scores)
    mean = sum(verls) / len(verls)
    ours = [pass_at_k(spec.k)(score, scores) for score in scores]
    assert ours == pytest.approx([len(scores) * (one - mean) for one in verls])


def test_pass_at_k_needs_groups_of_three() -> None:
    with pytest.raises(ImportedError, match=r"rollout\.n is 2: .* give at least 3"):
        of_verl("algorithm.adv_estimator=grpo_passk", f"{PREFIX}.rollout.n=2")


@pytest.mark.parametrize(
    ("given", "form"),
    [
        ("rollout_is=token", {"type": "token_truncation", "cap": 2.0}),
        (
            "rollout_is=sequence rollout_is_threshold=3.0",
            {"type": "sequence_truncation", "cap": 3.0},
        ),
        # A text is two numbers to verl, but one to Python's float.
        (
            "rollout_is=token rollout_is_threshold='0.5_5'",
            {"type": "masking", "level": "token", "low": 0.5, "high": 5.0},
        ),
        (
            "rollout_is=token rollout_is_batch_normalize=True",
            {"type": "token_truncation", "cap": 2.0, "normalize": "batch"},
        ),
        # verl's bounds are those of the inverse ratio.
        (
            "rollout_rs=seq_mean_k1 rollout_rs_threshold=0.5_4.0",
            {"type": "geometric_rejection", "low": 0.25, "high": 2.0, "normalize": "batch"},
        ),
        (
            "rollout_rs=seq_mean_k1 rollout_rs_threshold=1.25",
            {"type": "geometric_rejection", "low": 0.8, "high": 1.25, "normalize": "batch"},
        ),
        (
            "rollout_is=sequence rollout_rs=seq_sum_k1 rollout_rs_threshold=0.5_2.0",
            {"type": "masking", "level": "sequence", "low": 0.5, "high": 2.0},
        ),
        ("bypass_mode=True", None),
    ],
)
def test_corrections(given: str, form: dict[str, Any] | None) -> None:
    made = of_verl(*(f"{CORRECTION}.{one}" for one in given.split()))
    assert tree_of(made)["algorithm"]["off_policy"] == form
    assert recipe_of(made).algorithm.off_policy is not None or form is None
    assert made.lost == {}


@pytest.mark.parametrize(
    ("given", "lost"),
    [
        ("rollout_is=token rollout_rs=seq_max_k3 rollout_rs_threshold=0.1", "rollout_rs"),
        ("rollout_is=token rollout_rs=seq_mean_k1 rollout_rs_threshold=0.9_1.1", "rollout_rs"),
        (
            "rollout_is=sequence rollout_rs=seq_sum_k1 rollout_rs_threshold=0.1_10.0",
            "rollout_rs_threshold",
        ),
        ("rollout_is=token bypass_mode=True", "rollout_is"),
    ],
    ids=["maximum", "both", "cut within", "bypassed"],
)
def test_what_has_no_form_is_a_comment(given: str, lost: str) -> None:
    made = of_verl(*(f"{CORRECTION}.{one}" for one in given.split()))
    assert f"{CORRECTION}.{lost}" in made.lost
    recipe_of(made)


def test_weights_of_each_pass_are_those_of_the_plain_policy_gradient() -> None:
    made = of_verl(
        *(f"{CORRECTION}.bypass_mode=True", f"{CORRECTION}.loss_type=reinforce"),
        *(f"{CORRECTION}.rollout_is=sequence", f"{MODE}=sapo"),
    )
    loss = recipe_of(made).algorithm.parts.policy_loss
    assert (loss.type, loss.off_policy.type, loss.weighs_by) == (
        *("reinforce", "sequence_truncation", "now"),
    )
    assert list(made.lost) == [MODE]


@pytest.mark.parametrize(
    ("given", "loss"),
    [
        ((), {"type": "distillation", "divergence": "forward_kl"}),
        ((f"{LOSS}.loss_mode=k2",), {"type": "distillation", "divergence": "reverse_kl"}),
        (
            (f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.topk=64"),
            {"type": "distillation", "divergence": "forward_kl", "top_k": 64},
        ),
        (
            (
                *(f"{LOSS}.loss_mode=k1", f"{LOSS}.use_policy_gradient=True"),
                f"{LOSS}.clip_ratio_high=0.3",
            ),
            {"type": "ppo_policy", "clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0},
        ),
    ],
    ids=["k3", "k2", "top k", "rewards"],
)
def test_a_teacher_alone(given: tuple[str, ...], loss: dict[str, Any]) -> None:
    made = of_verl(*TEACHER, f"{LOSS}.use_task_rewards=False", "algorithm.gamma=0.9", *given)
    tree, algorithm = tree_of(made), recipe_of(made).algorithm
    assert algorithm.type == "on_policy_distillation"
    assert tree["algorithm"]["policy_loss"] == {**loss, "aggregation": "token_mean"}
    assert tree["teacher"]["model"]["path"] == "/t"
    assert "reward" not in tree
    # verl discounts nothing here, whatever it says.
    assert algorithm.parts.advantages.gamma == 0
    assert "algorithm.gamma" in made.lost


def test_a_teacher_beside_a_reward_is_a_kl_in_the_loss() -> None:
    made = of_verl(
        *TEACHER, f"{LOSS}.distillation_loss_coef=0.5", f"{LOSS}.loss_mode=k2",
        f"{ACTOR}.use_kl_loss=True",
    )  # fmt: skip
    tree = tree_of(made)
    loss = tree["algorithm"]["policy_loss"]
    assert tree["algorithm"]["type"] == recipe_of(made).algorithm.type == "grpo"
    assert (loss["kl_in_loss"], loss["kl_form"]) == (0.5, "k2")
    assert "reference" not in tree
    assert {"teacher", "reward"} <= set(tree)
    assert "the one to the teacher" in made.lost[f"{ACTOR}.use_kl_loss"]


def test_teachers_that_compare_otherwise_are_refused_with_a_remedy() -> None:
    alone = f"{LOSS}.use_task_rewards=False"
    with pytest.raises(ImportedError, match="loss_mode is 'k3' with use_policy_gradient"):
        of_verl(*TEACHER, alone, f"{LOSS}.use_policy_gradient=True")
    with pytest.raises(ImportedError, match=r"loss_mode is 'abs'.* give one of k3"):
        of_verl(*TEACHER, alone, f"{LOSS}.loss_mode=abs")
    with pytest.raises(ImportedError, match="use_task_rewards is on"):
        of_verl(*TEACHER, f"{LOSS}.loss_mode=forward_kl_topk")


def test_a_teachers_gpus_are_a_pool_of_their_own() -> None:
    gpus = ("distillation.nnodes=1", "distillation.n_gpus_per_node=4")
    tree = tree_of(of_verl(*TEACHER, f"{LOSS}.use_task_rewards=False", *gpus))
    assert tree["pools"]["teacher"]["devices"] == ["cuda:1", "cuda:2", "cuda:3", "cuda:4"]
    # verl's default is a teacher in two slices.
    assert tree["teacher"]["layout"] == {"tp": 2, "dp": 2}


def test_several_teachers_keep_their_rows_and_their_gpus() -> None:
    entries = "+distillation.teacher_models."
    more = [
        f"{entries}{name}.{key}={value}"
        for name, data in (("Math_1", "openai/gsm8k"), ("code", "kodcode"))
        for key, value in (("model_path", f"/{name}"), ("key", data), ("num_replicas", 3))
    ]
    sliced = f"{entries}code.inference.tensor_model_parallel_size=1"
    made = of_verl(TEACHER[0], f"{LOSS}.use_task_rewards=False", *more, sliced)
    tree = tree_of(made)
    assert tree["teacher"] == {
        "named": {
            "math1": {"model": {"path": "/Math_1"}, "layout": {"tp": 2, "dp": 3}},
            "code": {"model": {"path": "/code"}, "layout": {"dp": 3}},
        },
        "route": {
            "by": "metadata.data_source",
            "to": {"openai/gsm8k": "math1", "kodcode": "code"},
        },
    }
    devices = [tree["pools"][f"teacher-{name}"]["devices"] for name in ("math1", "code")]
    assert [len(own) for own in devices] == [6, 3]
    assert recipe_of(made).roles == ("actor", "teacher-math1", "teacher-code")
    assert not [name for name in made.lost if name.startswith("distillation")]
    with pytest.raises(ImportedError, match=r"code\.key is None: of several teachers each"):
        of_verl(TEACHER[0], f"{LOSS}.use_task_rewards=False", *more[:4])


def test_the_entry_of_a_teacher_that_is_alone_may_have_any_name() -> None:
    entries = "+distillation.teacher_models."
    made = of_verl(
        *TEACHER,
        f"{LOSS}.use_task_rewards=False",
        f"{entries}a.model_path=/a",
        f"{entries}a.num_replicas=3",
        f"{entries}a.inference.tensor_model_parallel_size=1",
    )
    teacher = tree_of(made)["teacher"]
    assert (teacher["model"]["path"], teacher["layout"]) == ("/a", {"dp": 3})
    own = made.lost["distillation.teacher_models.teacher_model.model_path"]
    assert "verl drops the entry" in own


def test_a_teacher_that_is_off_is_none() -> None:
    made = of_verl(f"{LOSS}.topk=64", TEACHER[1], f"{LOSS}.loss_mode=k3")
    assert "teacher" not in tree_of(made)
    assert set(made.lost) == {f"{LOSS}.topk", TEACHER[1].partition("=")[0]}
    assert "no teacher is asked for" in made.lost[f"{LOSS}.topk"]


@pytest.mark.parametrize("mode", ["k3", "k2"])
def test_estimators_of_a_sampled_token_have_the_gradient_that_the_import_says(mode: str) -> None:
    teacher, logits = [0.7, 0.2, 0.1], [0.4, -0.3, 0.1]

    def policy(logits: list[float]) -> list[float]:
        total = sum(math.exp(one) for one in logits)
        return [math.exp(one) / total for one in logits]

    def divergence(logits: list[float]) -> float:
        pairs = list(zip(teacher, policy(logits), strict=True))
        if mode == "k3":
            return sum(p * math.log(p / q) for p, q in pairs)
        return sum(q * math.log(q / p) for p, q in pairs)

    def estimate(token: int, logits: list[float]) -> float:
        log = math.log(policy(logits)[token] / teacher[token])
        return math.exp(-log) + log - 1 if mode == "k3" else 0.5 * log**2

    def slope(of: Any, place: int) -> float:
        step = 1e-5
        up, down = ([x + d * (n == place) for n, x in enumerate(logits)] for d in (step, -step))
        return (of(up) - of(down)) / (2 * step)

    drawn = policy(logits)
    for place in range(3):
        mean = sum(
            q * slope(lambda given, token=token: estimate(token, given), place)
            for token, q in enumerate(drawn)
        )
        # Differences of this step are exact to about 1e-10.
        assert mean == pytest.approx(slope(divergence, place), abs=1e-8)


def test_muon_of_megatron_has_its_own_numbers() -> None:
    optim = f"{ACTOR}.optim"
    made = of_verl(f"{optim}.optimizer=muon", f"{optim}.muon_momentum=0.9")
    optimizer = recipe_of(made).actor.optimizer
    assert (optimizer.type, optimizer.momentum, optimizer.nesterov) == ("muon", 0.9, False)
    # torch's has another default of its own.
    assert recipe_of(of_verl(f"{optim}.optimizer=Muon")).actor.optimizer.nesterov
