"""The page's table on models, optimizers and devices."""

from __future__ import annotations

from rolemesh.coordinator.imports.tables.facts import EMPTY, Cell, Fact, Topic, cell, words
from rolemesh.coordinator.imports.values import models as of
from rolemesh.coordinator.imports.values.placing import placing, put_placing

_ACTOR = "actor_rollout_ref.actor."
_REF = "actor_rollout_ref.ref."
_ROLLOUT = of.ROLLOUT
_MODEL = of.MODEL
_GRANULARITY = f"{_ACTOR}megatron.override_transformer_config.recompute_granularity"


def _of_role(role: str) -> tuple[Fact, ...]:
    """The optimizer and the passes of a role; the page shows those of the actor."""
    verl, is_actor = of.VERL[role], role == "actor"

    def own(found: Cell) -> Cell:
        return found if is_actor else EMPTY

    optimizer = f"{role}.optimizer"
    return (
        Fact(
            what="optimizer",
            target=f"{optimizer}.type",
            here=f"`{optimizer}.type`: adamw, muon",
            take=of.optimizer_type(role),
            openrlhf=cell(f"{role}.optim"),
            verl=cell(f"{verl}optim.optimizer"),
            is_shown=is_actor,
            trl=own(cell("optim")),
        ),
        Fact(
            what="learning rate",
            target=f"{optimizer}.learning_rate",
            openrlhf=cell(f"{role}.adam.lr"),
            verl=cell(f"{verl}optim.lr"),
            is_shown=is_actor,
            trl=own(cell("learning_rate")),
        ),
        Fact(
            what="schedule",
            target=f"{optimizer}.schedule.type",
            openrlhf=cell(f"{role}.lr_scheduler", take=of.schedule(f"{role}.lr_scheduler")),
            verl=cell(
                f"{verl}optim.lr_scheduler_type",
                take=of.schedule(f"{verl}optim.lr_scheduler_type"),
            ),
            is_shown=is_actor,
            trl=own(cell("lr_scheduler_type", take=of.schedule("lr_scheduler_type"))),
        ),
        Fact(
            what="warm-up",
            target=f"{optimizer}.warmup_steps",
            openrlhf=cell(f"{role}.lr_warmup_ratio", take=of.openrlhf_warmup(role)),
            verl=cell(
                *(f"{verl}optim.lr_warmup_steps", f"{verl}optim.lr_warmup_steps_ratio"),
                take=of.verl_warmup(role),
            ),
            is_shown=is_actor,
            trl=own(cell("warmup_steps", "warmup_ratio", take=of.trl_warmup)),
        ),
        Fact(
            what="least learning rate",
            target=f"{optimizer}.schedule.min_learning_rate",
            openrlhf=cell(f"{role}.min_lr_ratio", take=of.openrlhf_rate(role)),
            verl=cell(
                *(f"{verl}optim.min_lr_ratio", f"{verl}optim.min_lr"), take=of.verl_rate(role)
            ),
            is_shown=is_actor,
            trl=own(cell("lr_scheduler_kwargs", take=of.trl_rate)),
        ),
        Fact(
            what="clip of the gradient",
            target=f"{optimizer}.max_grad_norm",
            openrlhf=cell(f"{role}.max_norm"),
            verl=cell(f"{verl}grad_clip", f"{verl}optim.clip_grad", take=of.verl_clip(role)),
            is_shown=is_actor,
            trl=own(cell("max_grad_norm")),
        ),
        Fact(
            what="weight decay",
            target=f"{optimizer}.weight_decay",
            openrlhf=cell(f"{role}.adam.weight_decay"),
            verl=cell(f"{verl}optim.weight_decay"),
            is_shown=is_actor,
            trl=own(cell("weight_decay")),
        ),
        Fact(
            what="betas of AdamW",
            target=f"{optimizer}.betas",
            take=lambda source: of.betas(source, role),
            put=of.put_moments(role, "betas"),
            openrlhf=cell(f"{role}.adam.betas"),
            verl=cell(f"{verl}optim.betas"),
            is_shown=is_actor,
            trl=own(cell("adam_beta1", "adam_beta2")),
        ),
        Fact(
            what="eps of AdamW",
            target=f"{optimizer}.eps",
            put=of.put_moments(role, "eps"),
            openrlhf=cell(f"{role}.adam.eps"),
            is_shown=is_actor,
            trl=own(cell("adam_epsilon")),
        ),
        Fact(
            what="momentum of Muon",
            target=f"{optimizer}.momentum",
            openrlhf=cell(
                f"{role}.muon.momentum",
                take=of.only_muon(role, f"{role}.muon.momentum", "number"),
            ),
            verl=cell(
                f"{verl}optim.muon_momentum",
                take=of.only_muon(role, f"{verl}optim.muon_momentum", "number"),
            ),
            is_shown=is_actor,
        ),
        Fact(
            what="Nesterov's step of Muon",
            target=f"{optimizer}.nesterov",
            verl=cell(
                f"{verl}optim.muon_nesterov",
                take=of.only_muon(role, f"{verl}optim.muon_nesterov", "flag"),
            ),
            is_shown=is_actor,
        ),
        Fact(
            what="iterations of Muon",
            target=f"{optimizer}.ns_steps",
            openrlhf=cell(
                f"{role}.muon.ns_steps", take=of.only_muon(role, f"{role}.muon.ns_steps", "whole")
            ),
            verl=cell(
                f"{verl}optim.muon_num_ns_steps",
                take=of.only_muon(role, f"{verl}optim.muon_num_ns_steps", "whole"),
            ),
            is_shown=is_actor,
        ),
        Fact(
            what="moments in the host's memory",
            target=f"{optimizer}.offload",
            openrlhf=cell("ds.adam_offload", take=lambda s: s.flag("ds.adam_offload") or None),
            verl=cell(
                f"{verl}fsdp_config.optimizer_offload",
                take=lambda s: s.flag(f"{verl}fsdp_config.optimizer_offload") or None,
            ),
            is_shown=is_actor,
        ),
        Fact(
            what="size of one pass",
            target=f"{role}.model.micro_batch_tokens",
            here=f"`{role}.model.micro_batch_tokens`: tokens",
            take=of.pass_tokens(role),
            openrlhf=cell(
                *("train.max_tokens_per_gpu", "train.micro_batch_size"),
                text="{0} (tokens), {1} (rows)",
            ),
            verl=cell(
                f"{verl}ppo_max_token_len_per_gpu",
                f"{verl}ppo_micro_batch_size_per_gpu",
                f"{verl}use_dynamic_bsz",
                text="{0} (tokens, with {2}), {1} (rows)",
            ),
            is_shown=is_actor,
            trl=own(cell("per_device_train_batch_size", text="{0} (rows)")),
        ),
    )


_CRITIC = (
    Fact(
        what="the critic's model",
        target="critic.model.path",
        openrlhf=cell("critic.model_name_or_path", take=of.critic_place),
        verl=cell("critic.model.path", take=of.critic_place),
    ),
    Fact(
        what="recompute its activations",
        target="critic.model.recompute",
        openrlhf=cell(take=of.recompute("actor.gradient_checkpointing_enable")),
        verl=cell(
            "critic.model.enable_gradient_checkpointing",
            take=of.recompute("critic.model.enable_gradient_checkpointing"),
        ),
        is_shown=False,
    ),
)

MODELS = Topic(
    title="Models, optimizer, devices",
    facts=(
        Fact(
            what="the model",
            target="actor.model.path",
            here="`actor.model.path`, `reference.model.path`",
            trl=cell(
                "model_name_or_path",
                text="`model` of the trainer; {0}",
                take=of.model_place("model_name_or_path"),
            ),
            openrlhf=cell(
                "actor.model_name_or_path", take=of.model_place("actor.model_name_or_path")
            ),
            verl=cell(f"{_MODEL}path", take=of.model_place(f"{_MODEL}path")),
        ),
        *_CRITIC,
        Fact(
            what="an adapter (LoRA)",
            here="`actor.model.adapter.rank`, `actor.model.adapter.alpha`, "
            "`actor.model.adapter.targets`, `actor.model.adapter.scaling` "
            "([adapters](adapters.md))",
            take=of.adapter,
            put=of.put_adapter,
            trl=cell(
                *("use_peft", "lora_r", "lora_alpha", "lora_target_modules", "use_rslora"),
                text="`peft_config` of the trainer; {0}, {1}, {2}, {3}, {4}",
            ),
            openrlhf=cell("ds.lora.rank", "ds.lora.alpha", "ds.lora.target_modules"),
            verl=cell(f"{_MODEL}lora_rank", f"{_MODEL}lora_alpha", f"{_MODEL}target_modules"),
        ),
        Fact(
            what="an adapter to begin with",
            here="`actor.model.adapter.from`",
            trl=words("a `PeftModel` as `model`"),
            verl=cell(f"{_MODEL}lora_adapter_path"),
        ),
        Fact(
            what="the reference with an adapter",
            here="`reference: {}`",
            trl=words("the model with its adapter off"),
            verl=words("the model with its adapter off"),
        ),
        *_of_role("actor"),
        *_of_role("critic"),
        Fact(
            what="pass of the reference",
            target="reference.model.micro_batch_tokens",
            take=of.pass_tokens("reference"),
            # Put where there is a reference, once all facts are in.
            put=lambda draft, value: draft.keep("reference.model.micro_batch_tokens", value),
            openrlhf=cell("rollout.max_tokens_per_gpu", "rollout.micro_batch_size"),
            verl=cell(
                *(f"{_REF}log_prob_max_token_len_per_gpu", f"{_REF}log_prob_use_dynamic_bsz"),
                f"{_REF}log_prob_micro_batch_size_per_gpu",
                text="{0} (tokens), {2} (rows)",
            ),
        ),
        Fact(
            what="recompute activations",
            target="actor.model.recompute",
            trl=cell("gradient_checkpointing", take=of.recompute("gradient_checkpointing")),
            openrlhf=cell(
                "actor.gradient_checkpointing_enable",
                take=of.recompute("actor.gradient_checkpointing_enable"),
            ),
            verl=cell(
                *(f"{_MODEL}enable_gradient_checkpointing", _GRANULARITY),
                text="{0}",
                take=of.recompute(f"{_MODEL}enable_gradient_checkpointing", _GRANULARITY),
            ),
        ),
        Fact(
            what="GPUs",
            here="`pools.devices`, `actor.train`, `reference.layout`",
            take=placing,
            put=put_placing,
            trl=words("processes of `accelerate launch`"),
            openrlhf=cell(
                *("actor.num_nodes", "actor.num_gpus_per_node", "ds.tensor_parallel_size"),
                text="{0} x {1}, {2}",
            ),
            verl=cell(
                *("trainer.nnodes", "trainer.n_gpus_per_node"),
                f"{_ACTOR}megatron.tensor_model_parallel_size",
                f"{_ACTOR}megatron.pipeline_model_parallel_size",
                f"{_ACTOR}megatron.expert_model_parallel_size",
                f"{_ACTOR}fsdp_config.fsdp_size",
                *(f"{_ACTOR}{name}" for name in of.CUTS),
                text="{0} x {1}, {2}, {3}, {4}, {5}, {6}, {7}",
            ),
        ),
        Fact(
            what="slices and stages of reference and critic",
            here="`reference.layout`, `critic.train`",
            verl=cell(
                *(f"{_REF}megatron.tensor_model_parallel_size",),
                f"{_REF}megatron.pipeline_model_parallel_size",
                *("critic.megatron.tensor_model_parallel_size",),
                "critic.megatron.pipeline_model_parallel_size",
                *(f"{one}megatron.expert_model_parallel_size" for one in (_REF, "critic.")),
                *(f"{one}{name}" for one in (_REF, "critic.") for name in of.CUTS),
            ),
            is_shown=False,
        ),
        Fact(
            what="the sampler's GPUs",
            here="`actor.generate.tp`, `rollout.layout.tp`",
            trl=cell("vllm_tensor_parallel_size"),
            openrlhf=cell("vllm.tensor_parallel_size"),
            verl=cell(f"{_ROLLOUT}tensor_model_parallel_size"),
        ),
        Fact(
            what="the sampler",
            here="`actor.rollout.type`",
            take=of.sampler,
            put=of.put_sampler,
            trl=cell("use_vllm"),
            openrlhf=cell("vllm.num_engines"),
            verl=cell(f"{_ROLLOUT}name"),
        ),
        Fact(
            what="the sampler's memory",
            target="actor.rollout.gpu_memory_utilization",
            trl=cell("vllm_gpu_memory_utilization", take=of.memory("vllm_gpu_memory_utilization")),
            openrlhf=cell(
                "vllm.gpu_memory_utilization", take=of.memory("vllm.gpu_memory_utilization")
            ),
            verl=cell(
                f"{_ROLLOUT}gpu_memory_utilization",
                take=of.memory(f"{_ROLLOUT}gpu_memory_utilization"),
            ),
        ),
        Fact(
            what="the sampler's context",
            target="actor.rollout.max_model_len",
            take=of.sampler_context,
            trl=cell("vllm_max_model_length"),
            openrlhf=cell("data.max_len"),
            verl=cell(f"{_ROLLOUT}max_model_len"),
        ),
        Fact(
            what="completions that are decoded together",
            target="actor.rollout.max_num_seqs",
            verl=cell(f"{_ROLLOUT}max_num_seqs", take=of.vllm_only(f"{_ROLLOUT}max_num_seqs")),
        ),
        Fact(
            what="experts as they were sampled",
            target="actor.rollout.replay_routes",
            verl=cell(
                f"{_ACTOR}router_replay.mode",
                text="{0}: `R3`",
                take=of.replays_routes(f"{_ACTOR}router_replay.mode"),
            ),
        ),
        Fact(
            what="no graphs in the sampler",
            target="actor.rollout.enforce_eager",
            openrlhf=cell("vllm.enforce_eager", take=of.eager("vllm.enforce_eager")),
            verl=cell(f"{_ROLLOUT}enforce_eager", take=of.eager(f"{_ROLLOUT}enforce_eager")),
        ),
        Fact(
            what="sampling apart from training",
            here="a section [`rollout`](layouts.md#sampling-apart-from-training) and "
            "`schedule.sampler`",
            trl=cell("vllm_mode", text='`vllm_mode="server"`'),
            openrlhf=cell("train.async_enable", "train.async_queue_size"),
            verl=cell(
                *(
                    "rollout.nnodes",
                    "rollout.n_gpus_per_node",
                    "async_training.staleness_threshold",
                ),
            ),
        ),
        Fact(
            what="new weights within a completion",
            here="`schedule.sampler.partial_rollouts`",
            openrlhf=cell("train.partial_rollout_enable"),
            verl=cell("async_training.partial_rollout"),
        ),
        Fact(
            what="servers that are started apart",
            here="`actor.rollout: {type: vllm_server, urls: [...]}` "
            "([stock vLLM servers](layouts.md#stock-vllm-servers))",
            trl=cell(
                *("vllm_mode", "vllm_server_base_url", "vllm_server_host", "vllm_server_port"),
                text='`vllm_mode="server"`, {1}, {2}, {3}',
            ),
        ),
        Fact(
            what="roles on the same GPUs",
            here="roles in one of the `pools`",
            trl=cell("vllm_mode", text='`vllm_mode="colocate"`'),
            openrlhf=cell(
                *("train.colocate_all", "train.colocate_actor_ref", "train.colocate_critic_reward")
            ),
            verl=words("`actor_rollout_ref.hybrid_engine`"),
        ),
    ),
)
