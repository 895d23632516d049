"""Rollout with `vllm serve` processes that run elsewhere, unmodified.

Needs no vLLM and no GPU here. What is asked and how answers are read is in `servers.requests`,
which server is asked in `servers.fleet`, how weights reach them in `servers.held`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import torch

from rolemesh.engine.layout.ranks import LayoutError
from rolemesh.engine.models.parameter_files import named_as_in_files
from rolemesh.engine.parallel.agreement import Peers, gather_facts
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.rollout.base import RolloutBackend
from rolemesh.engine.rollout.model_folder import WeightsStaleError
from rolemesh.engine.rollout.requests import (
    LaterRequests,
    RolloutRequest,
    RolloutTrajectory,
    completion_budget,
)
from rolemesh.engine.rollout.servers.admission import ServerAdmission, check_distribution
from rolemesh.engine.rollout.servers.client import SamplersUnavailableError, ServerRefusedError
from rolemesh.engine.rollout.servers.fleet import Fleet, Server
from rolemesh.engine.rollout.servers.held import HeldWeights, OwnWeights, held_weights
from rolemesh.engine.rollout.servers.requests import (
    COMPLETIONS,
    Row,
    Segment,
    Served,
    add_answer,
    body_of,
    check_end,
    check_temperature,
    most_bytes,
    scores_of,
    scoring_body,
)
from rolemesh.engine.rollout.servers.senders import WeightSender
from rolemesh.engine.specs import AdapterSpec, SamplingSpec, VllmServerSpec

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CPU = torch.device("cpu")
"""Where messages of the ranks lie."""

_LOOK_S = 0.02
"""How often the owner may act, and is asked for more, while no row ends."""

_CLOSING_S = 10.0
"""Most seconds for telling servers to forget."""


class VllmServerBackend(RolloutBackend):
    """Samples at servers that are handed each version of the weights.

    With an adapter its factors are written to a folder that the servers see, and each server loads
    it under a name of its own for each version, which requests then give. Without one, whole
    weights are broadcast to the servers' workers by NCCL; not verified on a GPU.

    Invariant: which version a token has is this object's own bookkeeping, and no server's word: a
    request names the weights that it wants, and what it brings is theirs. Where weights come in the
    middle of a generation, what runs is aborted and asked for again, from all tokens so far. A
    request that fails is asked again from where it began, with its seed, so that a server that dies
    changes no row. Owned by the rank's compute thread, on which its event loop runs.

    Each rank sends its own rows. Each also hands over an adapter by itself, under a name that they
    share, so that none waits for another in the middle of a generation; whole weights are sent by
    the first.

    Example::

        backend = VllmServerBackend(spec, Path("base"), adapter=AdapterSpec(rank=8))
        backend.update_weights(factors, policy_version=3)
        trajectories = list(backend.generate(requests, sampling))
    """

    takes_whole = True

    def __init__(
        self,
        spec: VllmServerSpec,
        model_path: Path,
        mesh: RankMesh | None = None,
        *,
        device: torch.device | None = None,
        updates_between_steps: bool = False,
        adapter: AdapterSpec | None = None,
        sender: WeightSender | None = None,
        own: Served | None = None,
    ) -> None:
        """Checks the servers, which have no weights of ours yet; see `factory.make_backend`.

        Args:
            spec: Servers, and their limits.
            model_path: Local folder of the model that they serve.
            mesh: Groups of this rank; None means that it is alone.
            device: Of whole weights, a GPU with its index.
            updates_between_steps: Whether each rank gets weights at a moment of its own.
            adapter: What is trained; None: whole weights.
            sender: Of whole weights; None: NCCL.
            own: What the servers have by themselves, as requests name it: they keep it, it counts
                as version 0, and no update may come. None: they are handed weights.

        Raises:
            LayoutError: Generation is spread over ranks, or whole weights would come to several
                ranks, each at its own moment.
            ValueError: The folder or the spec does not fit, or weights cannot be sent from here.
            ServerError: A server cannot be used as it was started; says what to change.
            SamplersUnavailableError: None can be reached.
        """
        mesh = mesh or RankMesh.single()
        generate = mesh.layout.generate
        if generate.tp > 1 or generate.pp > 1:
            raise LayoutError(
                f"generate.tp is {generate.tp} and generate.pp is {generate.pp}: rollout type "
                "vllm_server leaves that to its servers (--tensor-parallel-size); give 1 for both"
            )
        if adapter is None and updates_between_steps and mesh.world.size > 1:
            raise LayoutError(
                f"the rollout service has {mesh.world.size} ranks: whole weights go to the servers "
                "of rollout type vllm_server once, from one rank; give layout.dp 1, or train an "
                "adapter"
            )
        super().__init__(spec, model_path, adapter)
        self._spec: VllmServerSpec = spec
        self._peers = Peers.alone() if updates_between_steps else Peers.of(mesh.world, _CPU)
        (token, *_) = gather_facts(secrets.token_hex(4), mesh.world, _CPU)
        if spec.dtype == "float32":
            self.rounds_to = "float32"
        self._held: HeldWeights
        if own is not None:
            self._held, self.policy_version = OwnWeights(own), 0
        else:
            self._held = held_weights(
                spec,
                self._folder.path,
                adapter,
                token=token,
                device=device,
                sender=sender,
                is_sending=self._peers.is_first,
            )
        self._admission = ServerAdmission(spec, self._folder, self._held)
        self._fleet = Fleet(spec, self._admission)
        self._loop = asyncio.new_event_loop()
        self._running: dict[asyncio.Task[None], Row] = {}
        """Requests of the generation that is under way."""
        self._ended: deque[Row] = deque()
        """Rows of it that have finished, and were not yielded yet."""
        self._halted: list[Row] = []
        """Rows of it that an update has interrupted."""
        try:
            self._run(self._fleet.open())
        except BaseException:
            self._end_loop()
            raise

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        sampling: SamplingSpec,
        later: LaterRequests | None = None,
    ) -> Iterator[RolloutTrajectory]:
        """Samples one completion a request, yielding each as it finishes.

        Besides what `RolloutBackend` says, a temperature that vLLM does not take raises ValueError;
        servers that cannot be reached within deadline_s raise SamplersUnavailableError, and what a
        server refuses or answers with nonsense ServerError.
        """
        self._check_asked(requests)
        check_temperature(sampling)
        return self._alone(self._generate(requests, sampling, later))

    def _check_requests(self, requests: Sequence[RolloutRequest]) -> None:
        for request in requests:
            if request.images:
                raise ValueError(
                    f"prompt of row {request.row} has images, and rollout.type is 'vllm_server', "
                    "which shows its servers none: give vllm or hf, or data without images"
                )
        super()._check_requests(requests)

    def _generate(
        self,
        requests: Sequence[RolloutRequest],
        sampling: SamplingSpec,
        later: LaterRequests | None,
    ) -> Iterator[RolloutTrajectory]:
        self._ended.clear()
        self._halted.clear()
        more: Sequence[RolloutRequest] | None = requests
        try:
            self._run(self._held.look(self._fleet))
            while self._running or self._ended or more is not None:
                self._begin([self._row(one, sampling) for one in more or ()], sampling)
                if self._pause():
                    halted, self._halted = self._halted, []
                    self._begin(halted, sampling)
                while self._ended:
                    yield self._ended.popleft().trajectory()
                if self._running:
                    looks = self.between_steps is not None or later is not None
                    self._run(self._wait(_LOOK_S if looks else None))
                is_idle = not self._running and not self._ended
                more = None if later is None else later.take(is_idle=is_idle)
                later = None if more is None else later
                self._check_requests(more or ())
        finally:
            # Also when the caller stopped early or a request failed.
            self._abort()

    def _row(self, request: RolloutRequest, sampling: SamplingSpec) -> Row:
        longest = self._spec.max_model_len
        return Row(request, completion_budget(request, sampling, max_model_len=longest))

    def _begin(self, rows: Iterable[Row], sampling: SamplingSpec) -> None:
        """Sends what these rows still need."""
        version = self.policy_version
        for row in rows:
            task = self._loop.create_task(self._draw(row, sampling, version))
            self._running[task] = row

    def _halt(self, policy_version: int) -> None:
        """Interrupts all requests, and keeps what they brought, drawn by this version.

        Raises:
            Exception: What has just kept one from its end.
        """
        for row, failure in self._abort():
            if isinstance(failure, Exception):
                raise failure
            if row.reason is not None:
                continue
            is_whole = row.keep(policy_version, self._folder.stop_tokens)
            (self._ended if is_whole else self._halted).append(row)

    def _abort(self) -> list[tuple[Row, BaseException | None]]:
        """Ends all requests; gives their rows, and what each came to."""
        running, self._running = self._running, {}
        for task in running:
            task.cancel()
        if not running:
            return []
        ended = self._run(asyncio.gather(*running, return_exceptions=True))
        return list(zip(running.values(), ended, strict=True))

    async def _wait(self, timeout_s: float | None) -> None:
        """Waits until a row has ended or a little has passed; raises what kept one from it."""
        done, _ = await asyncio.wait(
            self._running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            del self._running[task]
            task.result()

    async def _draw(self, row: Row, sampling: SamplingSpec, policy_version: int) -> None:
        """Has a row drawn to its end."""

        async def at(server: Server) -> None:
            if self._held.are_trained:
                check_distribution(server, sampling)
            try:
                await self._draw_at(server, row, sampling)
            except ServerRefusedError as error:
                raise self._held.refusal(server, error) from error

        await self._fleet.ask(at)
        row.keep(policy_version, self._folder.stop_tokens)
        self._ended.append(row)

    async def _draw_at(self, server: Server, row: Row, sampling: SamplingSpec) -> None:
        """Has one server draw what a row still needs, from where its request begins."""
        row.begun = Segment()
        is_streamed = row.request.is_complete is not None or self.between_steps is not None
        most, stop_tokens, url = row.budget - len(row.tokens), self._folder.stop_tokens, server.url
        body = body_of(
            row, sampling, self._held.served, stop_tokens=stop_tokens, is_streamed=is_streamed
        )

        def add(answer: Any) -> None:
            add_answer(
                row.begun,
                answer,
                prompt=body["prompt"],
                most=most,
                vocab_size=self._folder.vocab_size,
                where=url,
            )

        timeout_s, max_bytes = self._spec.timeout_s, most_bytes(len(body["prompt"]) + most)
        client = server.client
        if is_streamed:
            stream = client.events(COMPLETIONS, body, timeout_s=timeout_s, max_bytes=max_bytes)
            async with aclosing(stream) as events:
                async for event in events:
                    num_known = len(row.begun.tokens)
                    add(event)
                    if row.cut(num_known):
                        return
        else:
            text = await client.post(COMPLETIONS, body, timeout_s=timeout_s, max_bytes=max_bytes)
            add(client.decoded(text, COMPLETIONS))
        check_end(row.begun, most=most, stop_tokens=stop_tokens, where=url)

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs of all tokens but the first, by one server; see `RolloutBackend.score`."""
        return next(iter(self.score_each(tokens).values()))

    def score_each(self, tokens: Sequence[int]) -> dict[str, list[float]]:
        """Log-probs by each server that can be reached; see `RolloutBackend.score_each`."""
        self._check_ready()

        async def at(server: Server) -> list[float]:
            body = scoring_body(tokens, self._held.served)
            try:
                text = await server.client.post(
                    COMPLETIONS,
                    body,
                    timeout_s=self._spec.timeout_s,
                    max_bytes=most_bytes(len(tokens) + 1),
                )
            except ServerRefusedError as error:
                raise self._held.refusal(server, error) from error
            answer = server.client.decoded(text, COMPLETIONS)
            return scores_of(answer, tokens, where=server.url)

        self._run(self._held.look(self._fleet))
        found = self._run(self._fleet.on_some(at))
        # What comes back later is held against these.
        self._admission.remember(tokens, next(iter(found.values())))
        return {f"the server {url}": scores for url, scores in found.items()}

    def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int
    ) -> None:
        """Hands weights to all servers that can be reached.

        Others get them before they are asked for anything (an adapter), or are left alone until the
        next update (whole weights). With an adapter its factors come instead: whole, by Hugging
        Face name, float32 [R, I] of A and [O, R] of B.

        Raises:
            ServerError: A server refused; says why.
            SamplersUnavailableError: None can be reached.
            BroadcastFailedError: Whole weights did not reach the workers.
        """
        version = self.policy_version
        try:
            with self._update(policy_version):
                self._halt(version)
                self._admission.forget()
                checked = self._expected.checked(weights)
                if self._adapter is None:
                    # Its loaders know the names of files: of experts, those of each.
                    checked = named_as_in_files(self._folder.shape, checked)
                taken = self._held.take(checked)

                def send() -> tuple[None, None]:
                    self._run(self._held.send(self._fleet, taken, policy_version))
                    return None, None

                self._peers.agree(send, (WeightsStaleError, SamplersUnavailableError))
        finally:
            # Behind it may be a transfer whose other ranks wait for this one.
            if isinstance(weights, Generator):
                weights.close()

    def update_shard(
        self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int
    ) -> None:
        """As `update_weights`: each rank is handed whole weights."""
        self.update_weights(tensors, policy_version)

    def weight_checksums(self) -> Mapping[str, str]:
        """SHA-256 (hex) of each factor as it was sent, float32 and whole: what the trainer has.

        Raises:
            WeightsStaleError: No whole set is held.
            NotImplementedError: Whole weights lie at the servers alone.
        """
        self._check_whole()
        return self._held.checksums()

    def sleep(self) -> int:
        """Nothing is held on a device of ours."""
        return 0

    def wake(self) -> int:
        """Nothing is held on a device of ours."""
        return 0

    def close(self) -> None:
        """Has the servers forget our adapters, and removes their folders."""
        if self._loop.is_closed():
            return
        self._hold_nothing("the back end was closed")
        self._abort()
        try:
            self._run(asyncio.wait_for(self._held.close(self._fleet), _CLOSING_S))
        except TimeoutError:
            logger.warning("servers did not answer in time: they may keep adapters of this run")
        finally:
            self._end_loop()

    def _run(self, work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
        return self._loop.run_until_complete(work)

    def _end_loop(self) -> None:
        self._run(self._fleet.close())
        self._loop.close()
