"""Plays the rows of a task with an environment, at an endpoint that takes and gives token ids.

Turns, seeds and tokens are the run's own: what plays here is the runner of a run's sampler, over
the client of a run that samples at vLLM's servers.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.data.rendering.rendering import ChatTokenizer, Renderer
from rolemesh.engine.evaluation.asking import Answered, Completion, EndpointGoneError, seed_of
from rolemesh.engine.evaluation.tasks import EvaluatedRow
from rolemesh.engine.rollout.episodes.episode import Episode
from rolemesh.engine.rollout.episodes.episodes import EpisodeRunner
from rolemesh.engine.rollout.requests import RolloutRequest
from rolemesh.engine.rollout.servers.client import SamplersUnavailableError, ServerError
from rolemesh.engine.rollout.servers.requests import Served
from rolemesh.engine.rollout.servers.sampler import VllmServerBackend
from rolemesh.engine.sandbox.host import Sandbox
from rolemesh.engine.specs import VllmServerSpec
from rolemesh.engine.specs.evaluation import AskedSpec, DrawingSpec, EvaluatedTaskSpec
from rolemesh.engine.specs.urls import masked_text

DEADLINE_S = 120.0
"""An endpoint that cannot be reached for so long counts as gone."""


class EpisodePlayer:
    """Plays episodes of one task. Owned by one thread, on which all its methods are called.

    A row's budget is that of a run: `max_tokens` of the drawing bounds the whole completion, what
    the environment says included, and so does what the longest sequence leaves.
    """

    def __init__(
        self,
        task: EvaluatedTaskSpec,
        asked: AskedSpec,
        drawing: DrawingSpec,
        *,
        model: str,
        max_model_len: int | None,
        tokenizer: ChatTokenizer,
        sandbox: Sandbox,
    ) -> None:
        """Loads the environment's class, and looks whether the endpoint can play.

        Args:
            task: With an environment.
            asked: The endpoint; its tokenizer is the folder of the policy's model.
            drawing: How tokens are drawn.
            model: What the endpoint calls the policy.
            max_model_len: Longest sequence, in tokens: the task's bound, or the endpoint's.
            tokenizer: Of the policy.
            sandbox: Where a user's class runs.

        Raises:
            UserCodeError: The environment's class cannot be loaded.
            ValueError: The folder is no model's, or no longest sequence is known.
            EndpointGoneError: The endpoint takes no token ids, or does not answer.
        """
        assert task.environment is not None
        assert asked.tokenizer is not None
        if max_model_len is None:
            raise ValueError(
                f"task {task.name}: max_model_len is left out, and the endpoint names none: give "
                "it in the task"
            )
        self._task = task
        self._drawing = drawing
        self._tokenizer = tokenizer
        self._renderer = Renderer(tokenizer)
        self._runner = EpisodeRunner(
            task.environment, tokenizer, max_model_len, sandbox=sandbox, fails_alone=True
        )
        spec = VllmServerSpec(
            urls=(asked.url.rstrip("/").removesuffix("/v1"),),
            max_model_len=max_model_len,
            max_num_seqs=asked.concurrency,
            timeout_s=asked.timeout_s,
            deadline_s=DEADLINE_S,
            token_variable=asked.key_variable,
        )
        try:
            self._backend = VllmServerBackend(spec, asked.tokenizer, own=Served(model=model))
        except (ServerError, SamplersUnavailableError) as error:
            raise EndpointGoneError(
                f"task {task.name} is played in episodes, which take an endpoint that speaks token "
                "ids: one of rolemesh (serve-policy, or a run's), or a server of vLLM. This one "
                f"does not do: {masked_text(str(error))}"
            ) from error

    def play(self, rows: Sequence[EvaluatedRow]) -> Generator[Answered, None, None]:
        """Plays all rows, and gives what came of each episode as it ends.

        Args:
            rows: Of the task.

        Yields:
            The completion is all that follows the prompt, what the environment said included.

        Raises:
            PromptTooLongError: A prompt leaves no room for a token.
            EndpointGoneError: The endpoint does not answer any more, or not as it should.
        """
        drawing, samples = self._drawing, self._drawing.samples
        prompts: list[Prompt] = []
        requests: list[RolloutRequest] = []
        for row in rows:
            text = self._renderer.prompt_text(row.row)
            prompt = row.prompt(text, self._renderer.tokens(text))
            for sample in range(samples):
                seed = seed_of(drawing, self._task.name, row, sample)
                number = len(requests)
                requests.append(RolloutRequest(row=number, prompt_tokens=prompt.tokens, seed=seed))
                prompts.append(prompt)
        try:
            for episode in self._runner.run(self._backend, prompts, requests, drawing.sampling()):
                yield self._played(episode, prompts[episode.row].text)
        except (ServerError, SamplersUnavailableError) as error:
            raise EndpointGoneError(f"task {self._task.name}: {masked_text(str(error))}") from error

    def _played(self, episode: Episode, prompt: str) -> Answered:
        at, sample = divmod(episode.row, self._drawing.samples)
        if episode.failure:
            return Answered(at=at, sample=sample, prompt=prompt, why=episode.failure)
        tokens = episode.completion_tokens
        completion = Completion(
            text=str(self._tokenizer.decode(tokens, skip_special_tokens=True)),
            finish_reason=episode.finish_reason,
            # Those that the policy sampled; the environment said the others.
            num_tokens=sum(episode.loss_mask),
        )
        return Answered(
            at=at, sample=sample, prompt=prompt, completion=completion, reward=episode.reward
        )

    def close(self) -> None:
        """Ends all connections."""
        self._backend.close()
