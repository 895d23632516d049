"""Rollout with plain transformers: small, slow, and the oracle that vLLM is compared with.

Shape letters: B rows of a wave that still run, D that differ when it begins, T tokens of a step, V
vocabulary.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from rolemesh.engine.hardware.cpu_threads import largest_product, threads_worth
from rolemesh.engine.hardware.devices import current_device, sent
from rolemesh.engine.layout.ranks import LayoutError
from rolemesh.engine.models.adapters.adapters import attach
from rolemesh.engine.models.adapters.shared_base import share_base
from rolemesh.engine.models.buffers import saved_buffers
from rolemesh.engine.models.folder import load_model
from rolemesh.engine.models.images.shown_images import Shown
from rolemesh.engine.models.layers.experts import group_experts
from rolemesh.engine.models.layers.routing import Routed, Routers, Routes
from rolemesh.engine.parallel.mesh import RankGroup, RankMesh
from rolemesh.engine.rollout.base import RolloutBackend
from rolemesh.engine.rollout.checksums import tensor_checksum
from rolemesh.engine.rollout.distribution import sampling_logprobs
from rolemesh.engine.rollout.hf.inputs import FirstInputs, RunningRow, WaveInputs
from rolemesh.engine.rollout.noise import exponential_noise, stream_starts
from rolemesh.engine.rollout.requests import (
    LaterRequests,
    RolloutRequest,
    RolloutTrajectory,
    completion_budget,
)
from rolemesh.engine.rollout.routes import KeptRoutes, check_routes, flat_routes
from rolemesh.engine.sleep_memory import SleepMemory, move_module
from rolemesh.engine.specs import AdapterSpec, HfSpec, ModelSpec, SamplingSpec


class _Waiting:
    """Requests of a generation that no wave has begun yet."""

    def __init__(self, requests: Sequence[RolloutRequest], later: LaterRequests | None) -> None:
        self._waiting = deque(requests)
        self._later = later

    @property
    def is_over(self) -> bool:
        """Whether none waits, and none will come."""
        return not self._waiting and self._later is None

    def hear(self, *, is_idle: bool) -> Sequence[RolloutRequest]:
        """Those that have come since, which wait from now on."""
        came = None if self._later is None else self._later.take(is_idle=is_idle)
        if came is None:
            self._later = None
        self._waiting.extend(came or ())
        return came or ()

    def next(self, number: int) -> list[RolloutRequest]:
        """Takes as many as that, at most, in their order."""
        return [self._waiting.popleft() for _ in range(min(number, len(self._waiting)))]


class HfBackend(RolloutBackend):
    """A transformers model of its own, decoded in waves of at most max_num_seqs rows.

    Prompts of a wave are padded on the left; a row leaves the wave, and its keys and values leave
    the cache, when it finishes. Tokens depend on the request's seed and the weights, not on the
    neighbours, up to rounding. A GPU draws other tokens of a seed than a CPU.

    Weights come in one of two ways. `update_weights` copies them. `update_shard` keeps the tensors
    themselves, which costs no memory beside them: their owner calls `drop_weights` before they
    change (`engine/weights/reuse.py`). Without weights the parameters are empty.

    Invariant: `policy_version` is that of the last whole update, or -1. Owned by the rank's
    compute thread.

    Example, on each rank of a layout in which each generates with a whole model::

        backend.update_shard(resharder.run(weights, policy_version=7), 7)
        trajectories = list(backend.generate(requests, sampling))
    """

    def __init__(
        self,
        spec: HfSpec,
        model_path: Path,
        mesh: RankMesh | None = None,
        *,
        device: torch.device | None = None,
        adapter: AdapterSpec | None = None,
    ) -> None:
        """Makes a model, without the folder's weights but for an adapter; see `make_backend`.

        Each rank generates with a whole model: a layout that spreads generation over ranks raises
        LayoutError.
        """
        if mesh is not None:
            generate = mesh.layout.generate
            if generate.tp > 1 or generate.pp > 1:
                raise LayoutError(
                    f"generate.tp is {generate.tp} and generate.pp is {generate.pp}: rollout type "
                    "hf samples with whole models; give 1 for both, or rollout type vllm"
                )
        super().__init__(spec, model_path, adapter)
        self._wave_rows = spec.max_num_seqs
        self._device = device or current_device()
        self._sleep_memory = SleepMemory()
        self._draws_by_counter = self._device.type != "cpu"
        if self._device.type == "cpu" and spec.dtype == "float32":
            self.rounds_to = "float32"
        # Random weights are drawn and thrown away; the trainer's generator must not notice.
        with torch.random.fork_rng(devices=[]):
            model = self._base() if adapter is None else self._adapted(adapter)
        self._keeps_routes = spec.replay_routes
        if self._keeps_routes:
            routers = Routers(model, check_routes(self._folder.shape), RankGroup((0,), 0, None))
            self.route_width = routers.width
        self._keeps_tensors = False
        self._parameters: dict[str, torch.Tensor] = {
            name: one
            for name, one in (*model.named_parameters(), *saved_buffers(model))
            if name in self._expected.shapes
        }
        """Those that come in updates."""
        self._empty()
        model.eval().requires_grad_(False)
        # The base of an adapter is the trainer's, too.
        base = [
            (name, one) for name, one in model.named_parameters() if name not in self._parameters
        ]
        share_base(base, self._device)
        self._model = model.to(self._device)
        self._inputs = FirstInputs(self._model, self._folder.path, self._device)

    def _base(self) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(
            self._folder.config, dtype=getattr(torch, self._spec.dtype), trust_remote_code=False
        )

    def _adapted(self, adapter: AdapterSpec) -> Any:
        """The folder's own weights, and an adapter of no values."""
        from transformers import AutoModelForCausalLM

        spec = ModelSpec(path=self._folder.path)
        model: Any
        model, _ = load_model(AutoModelForCausalLM, spec, config=self._folder.config)
        attach(model, adapter.model_copy(update={"start": None}))
        # What transformers computes experts by knows of no adapter.
        group_experts(model)
        return model.to(getattr(torch, self._spec.dtype))

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        sampling: SamplingSpec,
        later: LaterRequests | None = None,
    ) -> Iterator[RolloutTrajectory]:
        """Samples one completion a request, yielding each as it finishes within its wave.

        Those that come later join the wave that is decoded, which then begins anew from all its
        tokens.
        """
        self._check_asked(requests)
        return self._alone(self._generate(requests, sampling, later))

    def _generate(
        self,
        requests: Sequence[RolloutRequest],
        sampling: SamplingSpec,
        later: LaterRequests | None,
    ) -> Iterator[RolloutTrajectory]:
        waiting = _Waiting(requests, later)
        while not waiting.is_over:
            wave = [self._row(request, sampling) for request in waiting.next(self._wave_rows)]
            if wave:
                yield from self._decode(wave, sampling, waiting)
            else:
                self._pause()
                self._check_requests(waiting.hear(is_idle=True))

    def _row(self, request: RolloutRequest, sampling: SamplingSpec) -> RunningRow:
        return RunningRow(
            request=request,
            budget=completion_budget(request, sampling, max_model_len=self._spec.max_model_len),
            generator=torch.Generator().manual_seed(request.seed),
            routes=KeptRoutes(self.route_width) if self._keeps_routes else None,
        )

    def _decode(
        self, wave: list[RunningRow], sampling: SamplingSpec, waiting: _Waiting
    ) -> Iterator[RolloutTrajectory]:
        given = self._inputs.first(wave)
        cache: Any = None
        while wave:
            if self._pause():
                given, cache = self._inputs.first(wave), None
            product = largest_product(
                self._folder.config,
                num_tokens=given.tokens_DT.numel(),
                longest=given.attention_mask.shape[-1],
                num_predicted=len(given.tokens_DT),
            )
            routes = Routes(taken={}) if self._keeps_routes else None
            with (
                torch.no_grad(),
                threads_worth(product, self._device),
                Routed(routes),
                Shown(given.shown),
            ):
                outputs = self._model(
                    input_ids=given.tokens_DT,
                    attention_mask=given.attention_mask,
                    position_ids=given.positions,
                    past_key_values=cache,
                    use_cache=True,
                    # One row of logits a sequence: no [B, T, V] tensor.
                    logits_to_keep=1,
                )
                cache = outputs.past_key_values
                logits_BV = outputs.logits[:, -1]
                if len(logits_BV) < len(wave):
                    logits_BV = logits_BV[given.places]
                if routes is not None and routes.taken is not None:
                    self._keep(routes.taken, wave, given)
                tokens_B = self._draw(logits_BV, wave, sampling)
            running: list[int] = []
            for row in wave:
                row.policy_versions.append(self.policy_version)
            for index, row in enumerate(wave):
                reason = self._finish_reason(row)
                if reason is None:
                    running.append(index)
                else:
                    yield RolloutTrajectory(
                        row=row.request.row,
                        completion_tokens=row.tokens,
                        logprobs=row.logprobs,
                        finish_reason=reason,
                        policy_versions=row.policy_versions,
                        routes=None
                        if row.routes is None
                        else row.routes.of(len(row.request.prompt_tokens) + len(row.tokens)),
                    )
            wave = [wave[index] for index in running]
            came = waiting.hear(is_idle=False)
            self._check_requests(came)
            if came and wave and len(wave) < self._wave_rows:
                joining = waiting.next(self._wave_rows - len(wave))
                wave += [self._row(request, sampling) for request in joining]
                given, cache = self._inputs.first(wave), None
                continue
            staying = [given.places[index] for index in running]
            if staying != list(range(len(given.tokens_DT))):
                cache.batch_select_indices(
                    torch.tensor(staying, dtype=torch.int64, device=self._device)
                )
            given = given.following(tokens_B, running)

    def _keep(
        self, taken: dict[int, torch.Tensor], wave: Sequence[RunningRow], given: WaveInputs
    ) -> None:
        """Notes what each row's tokens of a pass went through."""
        # Places of what was computed: of left padding, none.
        is_real_DT = given.attention_mask[:, -given.tokens_DT.shape[1] :].bool()
        routes = flat_routes(taken).reshape(*is_real_DT.shape, self.route_width)
        at, real = given.positions.cpu().numpy(), is_real_DT.cpu().numpy()
        for row, place in zip(wave, given.places, strict=True):
            assert row.routes is not None  # routes are kept of all rows or of none
            row.routes.put(at[place][real[place]], routes[place][real[place]])

    def _draw(
        self, logits_BV: torch.Tensor, wave: Sequence[RunningRow], sampling: SamplingSpec
    ) -> torch.Tensor:
        """Draws a token for each row, each by its own seed, and notes it there.

        Args:
            logits_BV: Floating [B, V].
            wave: B rows.
            sampling: How to draw.

        Returns:
            int64 [B], where the logits are.

        Raises:
            RuntimeError: Logits are not finite.
        """
        logprobs_BV = sampling_logprobs(logits_BV, sampling)
        if sampling.greedy:
            tokens_B = logprobs_BV.argmax(dim=-1)
        else:
            # What torch.multinomial does for one draw, but for all rows in one operation.
            noise_BV = self._noise(wave, logprobs_BV)
            tokens_B = (logprobs_BV.exp() / noise_BV).argmax(dim=-1)
        drawn_B = logprobs_BV.gather(-1, tokens_B.unsqueeze(-1)).squeeze(-1)
        # All that a step reads from the device, in one copy; float64 holds both exactly.
        tokens, logprobs = torch.stack([tokens_B.double(), drawn_B.double()]).tolist()
        if not all(map(math.isfinite, logprobs)):
            raise RuntimeError("the model's logits are not finite: look for NaN in the weights")
        for row, token, logprob in zip(wave, tokens, logprobs, strict=True):
            row.tokens.append(int(token))
            row.logprobs.append(logprob)
        return tokens_B

    def _noise(self, wave: Sequence[RunningRow], logprobs_BV: torch.Tensor) -> torch.Tensor:
        """Exponential noise, float32 [B, V] beside the log-probs, a stream for each row."""
        if self._draws_by_counter:
            starts_B = stream_starts(
                [row.request.seed for row in wave], [len(row.tokens) for row in wave]
            )
            return exponential_noise(sent(starts_B, self._device), logprobs_BV.shape[-1])
        # torch.multinomial's bits. Calls of it for each row took a tenth of a small model's
        # generation.
        noise_BV = torch.empty_like(logprobs_BV)
        for noise_V, row in zip(noise_BV, wave, strict=True):
            noise_V.exponential_(generator=row.generator)
        return noise_BV

    def _finish_reason(self, row: RunningRow) -> Literal["stop", "length"] | None:
        is_complete = row.request.is_complete
        if row.tokens[-1] in self._folder.stop_tokens or (is_complete and is_complete(row.tokens)):
            return "stop"
        return "length" if len(row.tokens) == row.budget else None

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs of all tokens but the first, in one pass; see `RolloutBackend.score`."""
        self._check_ready()
        row_T = torch.tensor(tokens, device=self._device)
        with torch.no_grad():
            logits_TV = self._model(input_ids=row_T[None]).logits[0, :-1]
        found_N = logits_TV.float().log_softmax(-1).gather(-1, row_T[1:, None])
        scores: list[float] = found_N.squeeze(-1).tolist()
        return scores

    def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int
    ) -> None:
        """Copies every weight into the sampler's own model, cast to its type."""
        with self._update(policy_version):
            if self._keeps_tensors:
                # They are not its own to write to.
                self._empty()
            for name, tensor in self._expected.checked(weights):
                parameter = self._parameters[name]
                if parameter.shape != tensor.shape:
                    parameter.data = torch.empty(
                        tensor.shape, dtype=parameter.dtype, device=self._device
                    )
                parameter.copy_(tensor)

    def update_shard(
        self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int
    ) -> None:
        """Takes tensors as its weights, where they have its type and place; otherwise a cast copy.

        The rank's part is the whole model: names are Hugging Face's and shapes global. What the
        sampler held before is let go first, so that no two sets of weights are held at once; after
        a failure it holds none. The owner of the tensors calls `drop_weights` before writing to any
        of them.
        """
        with self._update(policy_version):
            self._empty()
            self._keeps_tensors = True
            try:
                for name, tensor in self._expected.checked(tensors):
                    parameter = self._parameters[name]
                    parameter.data = tensor.to(self._device, parameter.dtype)
            except BaseException:
                self._empty()
                raise

    def drop_weights(self, reason: str) -> None:
        """Lets go of all weights, too; see `RolloutBackend`."""
        super().drop_weights(reason)
        self._empty()

    def weight_checksums(self) -> Mapping[str, str]:
        """SHA-256 (hex) of each parameter, by Hugging Face name; tied ones under both names.

        Of an adapter's factors alone, where there is one.

        Raises:
            WeightsStaleError: No whole set of weights is held.
        """
        self._check_whole()
        named = dict(self._model.named_parameters(remove_duplicate=False))
        held = self._parameters if self._adapter is not None else {**named, **self._parameters}
        return {name: tensor_checksum(parameter) for name, parameter in held.items()}

    def sleep(self) -> int:
        """Moves the weights from a device to the host; on a CPU there is nothing to free.

        Tensors that another keeps too (`update_shard`) are dropped instead: a copy of them on the
        host would be a second one. They are to be sent again then.
        """
        dropped = 0
        if self._keeps_tensors and self._device.type != "cpu":
            dropped = sum(int(parameter.nbytes) for parameter in self._parameters.values())
            self.drop_weights("the sampler was put to sleep")
        return dropped + move_module(self._model, torch.device("cpu"), self._sleep_memory)

    def wake(self) -> int:
        """Moves the weights back to the device."""
        return move_module(self._model, self._device, self._sleep_memory)

    def close(self) -> None:
        """Drops the model."""
        self._hold_nothing("the back end was closed")
        del self._model
        self._parameters = {}

    def _empty(self) -> None:
        """Lets go of every parameter's memory."""
        for parameter in self._parameters.values():
            parameter.data = parameter.data.new_empty(0)
        self._keeps_tensors = False
