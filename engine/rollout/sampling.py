"""Sampling of a batch of experience from prompts: one completion a row, in an order of our own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from typing import Any, Protocol

import numpy as np
import torch

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.data.rendering.rendering import ChatTokenizer
from rolemesh.engine.experience import Column, Experience
from rolemesh.engine.images.prompt_images import images_text
from rolemesh.engine.rollout.base import RolloutBackend, generated
from rolemesh.engine.rollout.episodes.episode import Episode, as_episode
from rolemesh.engine.rollout.episodes.episodes import EpisodeRunner
from rolemesh.engine.rollout.requests import RolloutRequest
from rolemesh.engine.rollout.stops import stop_check
from rolemesh.engine.seeds import derive_seed
from rolemesh.engine.specs import SamplingSpec
from rolemesh.engine.specs.columns import (
    COLUMNS,
    ENVIRONMENT_REWARDS,
    IMAGES,
    NO_ROUTE,
    ROLLOUT_COLUMNS,
    ROUTES,
    SESSION,
)

Progress = Callable[[str, int, int], None]

_Row = dict[str, Any]
"""A finished row: its value of each column."""


OnBlock = Callable[[int, Experience], None]
"""Is handed the number of a block, and its rows."""


class Agents(Protocol):
    """Plays trajectories by programs that own their loop; see `engine.sessions.runner`."""

    @property
    def gives_reward(self) -> bool:
        """Whether they give rewards."""

    def run(
        self,
        backend: RolloutBackend,
        prompts: Sequence[Prompt],
        requests: Sequence[RolloutRequest],
        sampling: SamplingSpec,
        alive: Callable[[int], None],
    ) -> Iterable[Sequence[Episode]]:
        """The rows of each trajectory, by request; those that were left out have none."""


def sample_experience(
    backend: RolloutBackend,
    prompts: Sequence[Prompt],
    sampling: SamplingSpec,
    *,
    run_seed: int,
    step: int,
    lineage: int = 0,
    tokenizer: ChatTokenizer,
    progress: Progress,
    only: Sequence[int] | None = None,
    earlier: Sequence[int] = (),
    block_rows: int = 0,
    on_block: OnBlock | None = None,
    episodes: EpisodeRunner | None = None,
    agents: Agents | None = None,
    has_images: bool = False,
) -> Experience:
    """Samples `samples_per_prompt` completions a prompt.

    Rows are ordered by prompt, then by sample index, whatever order they finished in. The seed
    of a row derives from (run seed, step, prompt id, sample index) and the lineage; a prompt that
    stands in the batch twice goes on counting its sample index, so that no two rows are the same
    draw.

    Example: 3 prompts x 2 samples with block_rows 4 make block 0 (rows 0 to 3) and block 1 (rows 4
    and 5). With only=(1, 2) the part of block 0 that is handed over is rows 2 and 3.

    Args:
        backend: Draws the tokens.
        prompts: Of the batch, or of a slice of it.
        sampling: How to draw.
        run_seed: Seed of the run.
        step: Of the run.
        lineage: How often the run had gone back when it came to the step.
        tokenizer: Makes texts of completions.
        progress: Called after each completion.
        only: Places of the prompts to sample, ascending; None means all. A row has the same seed
            whether the others are sampled here or elsewhere.
        earlier: Ids of the prompts that stand in the batch before this slice of it.
        block_rows: Rows of a block of the whole batch, a multiple of samples_per_prompt; block i is
            rows i * block_rows to (i + 1) * block_rows - 1. 0 means that there are no blocks.
        on_block: With block_rows, is handed each block (the part of it that is sampled here) as
            soon as all its rows are finished, before the next completion is waited for. Blocks come
            in the order in which they are whole; what is in them does not depend on it.
        episodes: Plays each row with an environment; None: a completion is one turn.
        agents: Plays them by programs of their own, without blocks. A trajectory then has a row for
            each of its branches, or none where it was left out.
        has_images: Whether prompts of the run's data may have images. All slices of a batch must
            be told the same, whatever their own prompts have.

    Returns:
        The columns that RolloutService.Generate promises, B = prompts * samples_per_prompt rows.
        With an environment, environment_rewards besides; with agents, another number of rows, and
        session. With has_images, images besides.

    Raises:
        ValueError: block_rows would cut the samples of a prompt apart.
    """
    check_block_rows(block_rows, sampling)
    samples = sampling.samples_per_prompt
    requests: list[RolloutRequest] = []
    sample_indexes: list[int] = []
    rows: list[Prompt] = []
    blocks: list[int] = []
    seen = Counter({prompt_id: samples * times for prompt_id, times in Counter(earlier).items()})
    wanted = set(range(len(prompts)) if only is None else only)
    is_complete = stop_check(sampling, tokenizer)
    if is_complete is not None and (episodes is not None or agents is not None):
        raise ValueError(
            "sampling.stop or stop_token_ids is given, but the policy talks to an environment, "
            "which says where a turn ends: leave it out"
        )
    for place, prompt in enumerate(prompts):
        for sample in range(samples):
            sample_index = seen[prompt.prompt_id]
            seen[prompt.prompt_id] += 1
            if place not in wanted:
                continue
            sample_indexes.append(sample_index)
            rows.append(prompt)
            blocks.append((place * samples + sample) // block_rows if block_rows else 0)
            requests.append(
                RolloutRequest(
                    row=len(requests),
                    prompt_tokens=prompt.tokens,
                    seed=derive_seed(
                        run_seed, step, prompt.prompt_id, sample_index, lineage=lineage
                    ),
                    is_complete=is_complete,
                    images=prompt.images,
                )
            )

    if agents is not None:
        played_by_agents = agents.run(
            backend,
            rows,
            requests,
            sampling,
            lambda done: progress("generate", done, len(requests)),
        )
        branches = [one for of_request in played_by_agents for one in of_request]
        batch = _assemble(
            [_row_of(rows[one.row], sample_indexes[one.row], one, tokenizer) for one in branches],
            has_rewards=agents.gives_reward,
            route_width=0,
            has_images=has_images,
        )
        return batch | Experience.of_rows({SESSION: [one.session for one in branches]})

    # Rows lie in batch order, so a block is a run of them.
    members: dict[int, list[int]] = {}
    for row, block in enumerate(blocks):
        members.setdefault(block, []).append(row)
    missing = Counter(blocks)
    finished: dict[int, _Row] = {}
    assembled: dict[int, Experience] = {}
    played = (
        _single_turns(backend, requests, sampling)
        if episodes is None
        else episodes.run(backend, rows, requests, sampling)
    )
    # Closed: if the caller gives the work up, the back end must not wait for the garbage collector.
    with closing(played):
        for done, episode in enumerate(played, start=1):
            row = episode.row
            finished[row] = _row_of(rows[row], sample_indexes[row], episode, tokenizer)
            progress("generate", done, len(requests))
            block = blocks[row]
            missing[block] -= 1
            if missing[block]:
                continue
            here = members[block]
            assembled[block] = _assemble(
                [finished.pop(member) for member in here],
                has_rewards=episodes is not None,
                route_width=backend.route_width,
                has_images=has_images,
            )
            if block_rows and on_block is not None:
                on_block(block, assembled[block])
    unfinished = missing.total()
    if unfinished:
        raise RuntimeError(
            f"the rollout back end finished {len(requests) - unfinished} of {len(requests)} "
            "completions"
        )
    if not assembled:
        return without_rows(
            has_rewards=episodes is not None,
            route_width=backend.route_width,
            has_images=has_images,
        )
    if len(assembled) == 1:
        return next(iter(assembled.values()))
    return Experience.concat([assembled[block] for block in sorted(assembled)])


def _single_turns(
    backend: RolloutBackend, requests: Sequence[RolloutRequest], sampling: SamplingSpec
) -> Generator[Episode, None, None]:
    """Completions as episodes of one turn each, in the order in which they end."""
    with generated(backend, requests, sampling) as trajectories:
        yield from map(as_episode, trajectories)


def check_block_rows(block_rows: int, sampling: SamplingSpec) -> None:
    """Refuses blocks that cut the samples of a prompt apart.

    Raises:
        ValueError: Names block_rows.
    """
    samples = sampling.samples_per_prompt
    if block_rows < 0 or block_rows % samples:
        raise ValueError(
            f"block_rows is {block_rows}: give a multiple of samples_per_prompt ({samples}), or 0 "
            "for no blocks"
        )


def _row_of(prompt: Prompt, sample_index: int, episode: Episode, tokenizer: ChatTokenizer) -> _Row:
    """What a finished row brings to each column, packed, so that little is left for the end."""
    completion = episode.completion_tokens
    before = prompt.tokens if episode.prompt_tokens is None else episode.prompt_tokens
    return {
        "tokens": _packed("tokens", [*before, *completion]),
        "prompt_lengths": len(before),
        "logprobs": _packed("logprobs", episode.logprobs),
        "loss_mask": _packed("loss_mask", episode.loss_mask),
        "policy_versions": _packed("policy_versions", episode.policy_versions),
        "prompt_ids": prompt.prompt_id,
        "sample_indexes": sample_index,
        "finished": episode.finish_reason == "stop",
        "prompt_text": prompt.text,
        "completion_text": tokenizer.decode(completion, skip_special_tokens=True),
        "answer": prompt.answer,
        "metadata": prompt.metadata,
        IMAGES: images_text(prompt.images if episode.images is None else episode.images),
        ENVIRONMENT_REWARDS: episode.reward,
        ROUTES: None
        if episode.routes is None
        else _routes(episode.routes, len(before) + len(completion)),
    }


def _routes(routes: np.ndarray, num_tokens: int) -> torch.Tensor:
    """Routes of so many tokens; of those behind what was sampled none is known."""
    made = np.full((num_tokens, routes.shape[1]), NO_ROUTE, dtype=np.uint8)
    made[: len(routes)] = routes
    return torch.from_numpy(made)


def _packed(name: str, values: Sequence[float]) -> torch.Tensor:
    """Numbers as one row of the column of that name: a tenth of their size in Python's lists."""
    return torch.from_numpy(np.array(values, dtype=COLUMNS[name].dtype))


def without_rows(
    *, has_rewards: bool, route_width: int = 0, has_images: bool = False
) -> Experience:
    """The columns of a sampled batch of which another rank has all rows."""
    return _assemble([], has_rewards=has_rewards, route_width=route_width, has_images=has_images)


def _assemble(
    rows: Sequence[_Row], *, has_rewards: bool, route_width: int, has_images: bool
) -> Experience:
    names = [*ROLLOUT_COLUMNS]
    if has_rewards:
        names.append(ENVIRONMENT_REWARDS)
    if has_images:
        names.append(IMAGES)
    batch = Experience.of_rows({name: [row[name] for row in rows] for name in names})
    if not route_width:
        return batch
    nothing = torch.empty((0, route_width), dtype=torch.uint8)
    values = torch.cat([nothing, *(row[ROUTES] for row in rows)])
    tokens = batch["tokens"]
    return batch | Experience({ROUTES: Column(tokens.kind, values, tokens.offsets)})


SAMPLING_COLUMNS = ("logprobs", "loss_mask", "policy_versions", "finished")
"""Columns that `sampling_metrics` reads."""


def sampling_metrics(batch: Experience) -> dict[str, float]:
    """Scalars of a sampled batch: completion lengths in tokens, share that a stop token ended.

    Log-probs and versions are those of sampled tokens, lengths those of all tokens of a completion.
    """
    sampled = batch["loss_mask"].values
    lengths = batch["logprobs"].lengths().double()
    finished = batch["finished"].values.double()
    return {
        "completion_length/mean": float(lengths.mean()),
        "completion_length/max": float(lengths.max()),
        "completion_length/min": float(lengths.min()),
        "finished_fraction": float(finished.mean()),
        "sampler_logprob/mean": float(batch["logprobs"].values[sampled].double().mean()),
        "policy_version/min": float(batch["policy_versions"].values[sampled].min()),
        "policy_version/max": float(batch["policy_versions"].values[sampled].max()),
    }
