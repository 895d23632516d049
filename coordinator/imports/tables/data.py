"""The page's table on data, rewards and outputs."""

from __future__ import annotations

from rolemesh.coordinator.imports.tables.facts import Fact, Topic, cell, words
from rolemesh.coordinator.imports.values import data as of
from rolemesh.coordinator.imports.values.models import ROLLOUT

DATA = Topic(
    title="Data, reward, outputs",
    facts=(
        Fact(
            what="name of the run",
            target="run.name",
            take=of.run_name,
            trl=cell("run_name"),
            openrlhf=cell("logger.wandb.run_name"),
            verl=cell("trainer.experiment_name"),
        ),
        Fact(
            what="prompts",
            here="`actor.data.path`, `actor.data.columns`",
            put=of.put_data,
            trl=cell(
                *("dataset_name", "dataset_config", "dataset_train_split"),
                "dataset_prompt_column",
                text="`train_dataset`; {0}, {1}, {2}",
                take=of.trl_data,
            ),
            openrlhf=cell(
                *("data.prompt_dataset", "data.prompt_probs", "data.input_key", "data.label_key"),
                "data.prompt_split",
                take=of.openrlhf_data,
            ),
            verl=cell("data.train_files", "data.prompt_key", take=of.verl_data),
        ),
        Fact(
            what="text of the system turn",
            target="actor.data.system_prompt",
            kind="text",
            trl=cell("system_prompt"),
            is_shown=False,
        ),
        Fact(
            what="longest prompt",
            here="`actor.data.max_prompt_tokens`",
            openrlhf=cell("data.max_len", text="{0} (with its completion)"),
            verl=cell("data.max_prompt_length"),
        ),
        Fact(
            what="held-out prompts or rows",
            here="`actor.data.held_out_path` or `actor.data.held_out_size`",
            take=of.evaluated,
            put=of.put_evaluated,
            trl=cell("dataset_test_split", text="`eval_dataset`; {0}"),
            openrlhf=cell("eval.dataset"),
            verl=cell("data.val_files", "data.val_max_samples"),
        ),
        Fact(
            what="evaluate every n steps",
            target="run.evaluation.every_steps",
            trl=cell("eval_steps", "eval_strategy", take=of.every("eval_steps", "eval_strategy")),
            openrlhf=cell("eval.steps", take=of.every("eval.steps")),
            verl=cell("trainer.test_freq", take=of.every("trainer.test_freq")),
        ),
        Fact(
            what="completions a held-out prompt",
            target="run.evaluation.samples_per_prompt",
            take=of.drawn,
            trl=cell("num_generations_eval"),
            openrlhf=cell("eval.n_samples_per_prompt"),
            verl=cell(f"{ROLLOUT}val_kwargs.n"),
        ),
        Fact(
            what="reward function",
            target="reward",
            here='`reward: "python:rewards.py:f"` ([forms](rewards.md))',
            trl=cell("reward_funcs", take=of.trl_reward),
            openrlhf=cell("reward.remote_url", take=of.openrlhf_reward),
            verl=cell(
                *("reward.custom_reward_function.path", "reward.custom_reward_function.name"),
                take=of.verl_reward,
            ),
        ),
        Fact(
            what="reward model",
            here="`reward.source: {type: classifier, model: {path: ...}}`",
            trl=cell("reward_model_name_or_path"),
            openrlhf=cell("reward.model_name_or_path"),
            verl=cell("reward.reward_model.enable", "reward.reward_model.model_path"),
        ),
        Fact(
            what="weights of several",
            here="`reward.source.rewards.weight`",
            trl=cell("reward_weights"),
        ),
        Fact(
            what="save every n steps",
            target="run.checkpoint.every_steps",
            trl=cell("save_steps", "save_strategy", take=of.every("save_steps", "save_strategy")),
            openrlhf=cell("ckpt.save_steps", take=of.every("ckpt.save_steps")),
            verl=cell("trainer.save_freq", take=of.every("trainer.save_freq")),
        ),
        Fact(
            what="checkpoints kept",
            target="run.checkpoint.keep",
            trl=cell("save_total_limit", take=of.kept("save_total_limit")),
            openrlhf=cell("ckpt.max_num", take=of.kept("ckpt.max_num")),
            verl=cell(
                "trainer.max_actor_ckpt_to_keep", take=of.kept("trainer.max_actor_ckpt_to_keep")
            ),
        ),
        Fact(
            what="keep the best",
            here="`run.checkpoint.keep_best`",
            trl=cell("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
            openrlhf=cell("ckpt.best_metric_key"),
        ),
        Fact(
            what="early stopping",
            here="`run.early_stopping`",
            trl=words("`EarlyStoppingCallback`"),
        ),
        Fact(
            what="resume",
            here="`rolemesh train --resume DIR`",
            trl=cell("resume_from_checkpoint"),
            openrlhf=cell("ckpt.load_enable"),
            verl=cell("trainer.resume_mode"),
        ),
        Fact(
            what="trackers",
            here="`trackers`",
            target="trackers",
            take=of.trackers,
            trl=cell("report_to", "project"),
            openrlhf=cell(
                *("logger.wandb.key", "logger.wandb.project"),
                *("logger.wandb.org", "logger.wandb.group"),
            ),
            verl=cell("trainer.logger", "trainer.project_name"),
        ),
    ),
)
