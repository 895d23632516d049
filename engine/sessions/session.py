"""A session: the calls of one rollout, kept as they were sampled, and the branches they make."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rolemesh.engine.images.prompt_images import Grid, PromptImage

FinishReason = Literal["stop", "length"]

CALL_BYTES = 1500
"""What a call takes beside its tokens: Python's objects, and the digests of its answers. Measured
as 1.1 to 1.4 KB (CPython 3.11)."""

TOKEN_BYTES = 4
SAMPLED_TOKEN_BYTES = 8
"""Of a token that was sampled: its id and its log-prob."""


class SessionError(ValueError):
    """What was asked of a session cannot be; says what to do instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCall:
    """One call, as it was sampled."""

    number: int
    """Of the session, from 0, in the order in which calls ended."""
    parent: int | None
    """The call that it continues: the prompt begins with that one's prompt and what it sampled.
    None: it continues none, and begins a tree."""
    added_tokens: Sequence[int]
    """Token ids of the prompt behind those of the parent; without one, the whole prompt."""
    num_prompt_tokens: int
    sampled_tokens: Sequence[int]
    """Token ids as sampled, the end token included."""
    logprobs: Sequence[float]
    """Natural log-prob of each under the distribution it was drawn from."""
    versions: Sequence[tuple[int, int]]
    """(first token, policy_version from there on), ascending, from token 0."""
    finish_reason: FinishReason
    is_trained: bool
    """Whether the caller wants its tokens to be trained on."""
    images: Sequence[PromptImage]
    """Of the prompt, in the order of their places: those of the parent, where there is one."""

    def policy_versions(self) -> list[int]:
        """Version of the weights that sampled each token."""
        stops = [*(start for start, _ in self.versions[1:]), len(self.sampled_tokens)]
        return [
            version
            for (start, version), stop in zip(self.versions, stops, strict=True)
            for _ in range(start, stop)
        ]


@dataclass(slots=True, kw_only=True)
class Branch:
    """A path through a session's tree, from a first call to one that none continues: a row."""

    calls: Sequence[int]
    """Numbers of its calls."""
    prompt_tokens: list[int]
    """Token ids of the first call's prompt."""
    images: Sequence[PromptImage] = ()
    """Of that prompt. No later turn shows an image."""
    completion_tokens: list[int] = field(default_factory=list)
    """Token ids: what was sampled, and what stood between in the prompts."""
    loss_mask: list[bool] = field(default_factory=list)
    """True for a token that was sampled and is to be trained here. A call that several branches
    have is trained in the first of them alone."""
    logprobs: list[float] = field(default_factory=list)
    """Natural log-prob of each token that was sampled; 0 of the others."""
    policy_versions: list[int] = field(default_factory=list)
    """Version of the weights that sampled each; of the others, that of the first token after."""
    finish_reason: FinishReason = "stop"
    """Of its last call."""

    @property
    def num_turns(self) -> int:
        """Calls in it."""
        return len(self.calls)


class Session:
    """The calls of one rollout, as a tree. Not thread-safe: its store keeps the lock.

    Invariant: tokens are those that the sampler was given and gave. No text is encoded again. All
    calls of a path show the same images, in the prompt of its first call: one that shows others
    begins a tree, though its tokens are alike.

    Example: a call with the prompt "a" that samples "b", and one with the prompt "a b c" that
    samples "d", make one branch: prompt "a", completion "b c d", loss_mask 1 0 1. A third call with
    the prompt "a b e" that samples "f" makes a second branch, "a" and "b e f", with loss_mask
    0 0 1: "b" is trained once.
    """

    def __init__(self, session_id: str) -> None:
        """Begins without calls."""
        self.session_id = session_id
        self.calls: list[SessionCall] = []
        self.rewards: dict[int, float] = {}
        """Of single calls, by number."""
        self.num_bytes = 0
        """Of memory, about."""
        self._answers: dict[bytes, int] = {}
        """Call by the digest of the history that its answer makes."""

    def add(
        self,
        prompt_tokens: Sequence[int],
        sampled_tokens: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[tuple[int, int]],
        *,
        finish_reason: FinishReason,
        is_trained: bool = True,
        images: Sequence[PromptImage] = (),
    ) -> SessionCall:
        """Keeps a call that has ended.

        Args:
            prompt_tokens: Token ids that the sampler was given.
            sampled_tokens: Token ids that it gave.
            logprobs: Of each of those.
            versions: See `SessionCall`.
            finish_reason: Why it ended.
            is_trained: Whether the caller wants it to be trained on.
            images: Of the prompt, in the order of their places.
        """
        prompt, sampled = array("i", prompt_tokens), array("i", sampled_tokens)
        if len(logprobs) != len(sampled):
            raise ValueError(f"{len(logprobs)} log-probs for {len(sampled)} tokens")
        parent = self._longest_beginning(prompt, images)
        known = 0 if parent is None else _length(parent)
        call = SessionCall(
            number=len(self.calls),
            parent=None if parent is None else parent.number,
            added_tokens=prompt[known:],
            num_prompt_tokens=len(prompt),
            sampled_tokens=sampled,
            logprobs=array("f", logprobs),
            versions=tuple(versions),
            finish_reason=finish_reason,
            is_trained=is_trained,
            images=tuple(images) if parent is None else parent.images,
        )
        self.calls.append(call)
        # A call has its parent's, so they are there once.
        new_images = call.images if parent is None else ()
        self.num_bytes += (
            CALL_BYTES
            + TOKEN_BYTES * len(call.added_tokens)
            + SAMPLED_TOKEN_BYTES * len(call.sampled_tokens)
            + sum(len(image.data) for image in new_images)
        )
        return call

    def note_answer(self, digest: bytes, call: SessionCall) -> None:
        """Remembers which history of messages a call has made; the newest call with it counts."""
        self._answers[digest] = call.number

    def answered(self, digest: bytes) -> SessionCall | None:
        """The call that has made a history of messages."""
        number = self._answers.get(digest)
        return None if number is None else self.calls[number]

    def tokens(self, call: SessionCall) -> list[int]:
        """Token ids of a call's prompt and of what it sampled."""
        parts: list[Sequence[int]] = []
        one: SessionCall | None = call
        while one is not None:
            parts += (one.sampled_tokens, one.added_tokens)
            one = self._parent(one)
        return [token for part in reversed(parts) for token in part]

    def branches(self) -> list[Branch]:
        """All paths to calls that none continues, in the order of those calls.

        One without a token to train is none: nothing would learn from it.
        """
        continued = {call.parent for call in self.calls}
        trained: set[int] = set()
        branches = []
        for leaf in self.calls:
            if leaf.number in continued:
                continue
            branch = self._branch(self._path(leaf), trained)
            if any(branch.loss_mask):
                branches.append(branch)
        return branches

    def _branch(self, path: Sequence[SessionCall], trained: set[int]) -> Branch:
        first = path[0]
        branch = Branch(
            calls=tuple(call.number for call in path),
            prompt_tokens=list(first.added_tokens),
            images=first.images,
        )
        for call in path:
            versions = call.policy_versions()
            if call is not first:
                between = len(call.added_tokens)
                branch.completion_tokens += call.added_tokens
                branch.loss_mask += [False] * between
                branch.logprobs += [0.0] * between
                branch.policy_versions += versions[:1] * between
            is_new = call.is_trained and call.number not in trained
            if is_new:
                trained.add(call.number)
            branch.completion_tokens += call.sampled_tokens
            branch.loss_mask += [is_new] * len(call.sampled_tokens)
            branch.logprobs += call.logprobs
            branch.policy_versions += versions
            branch.finish_reason = call.finish_reason
        return branch

    def reward_of(self, branch: Branch) -> float | None:
        """Sum of the rewards of a branch's calls; None where none of them has one."""
        given = [self.rewards[number] for number in branch.calls if number in self.rewards]
        return sum(given) if given else None

    def set_rewards(self, rewards: Mapping[int, float]) -> None:
        """Gives single calls rewards.

        Raises:
            SessionError: There is no such call; nothing is kept then.
        """
        for number in rewards:
            if not 0 <= number < len(self.calls):
                raise SessionError(
                    f"call_rewards has call {number}, but session {self.session_id} has calls 0 to "
                    f"{len(self.calls) - 1}: number them in the order in which they ended"
                )
        self.rewards.update(rewards)

    def _longest_beginning(
        self, prompt: array[int], images: Sequence[PromptImage]
    ) -> SessionCall | None:
        """The call whose prompt and sampled tokens are the longest beginning of a prompt.

        It shows the same images: placeholders of all pictures of a size are alike.
        """
        shown = _names(images)
        best: SessionCall | None = None
        for call in reversed(self.calls):
            length = _length(call)
            longer = best is None or length > _length(best)
            may_begin = longer and length < len(prompt) and _names(call.images) == shown
            if may_begin and self._begins(prompt, call):
                best = call
        return best

    def _begins(self, prompt: array[int], call: SessionCall) -> bool:
        stop = _length(call)
        one: SessionCall | None = call
        while one is not None:
            for part in (one.sampled_tokens, one.added_tokens):
                start = stop - len(part)
                if prompt[start:stop] != part:
                    return False
                stop = start
            one = self._parent(one)
        return True

    def _path(self, leaf: SessionCall) -> list[SessionCall]:
        return list(reversed(list(self._up(leaf))))

    def _up(self, call: SessionCall) -> Iterator[SessionCall]:
        one: SessionCall | None = call
        while one is not None:
            yield one
            one = self._parent(one)

    def _parent(self, call: SessionCall) -> SessionCall | None:
        return None if call.parent is None else self.calls[call.parent]


def _length(call: SessionCall) -> int:
    """Tokens of its prompt and of what it sampled."""
    return call.num_prompt_tokens + len(call.sampled_tokens)


def _names(images: Sequence[PromptImage]) -> list[tuple[str, Grid]]:
    """What tells images apart."""
    return [(image.sha256, image.grid) for image in images]
