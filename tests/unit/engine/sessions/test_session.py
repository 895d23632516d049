"""Trees of calls, against a reference that keeps each call's tokens whole."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolemesh.engine.sessions.session import Branch, Session, SessionCall, SessionError


def keep(
    session: Session, prompt: str, sampled: str, *, version: int = 0, is_trained: bool = True
) -> SessionCall:
    """A call whose tokens are the letters' code points; each log-prob tells its token."""
    return session.add(
        list(map(ord, prompt)),
        list(map(ord, sampled)),
        [-ord(letter) / 8 for letter in sampled],
        [(0, version)],
        finish_reason="stop",
        is_trained=is_trained,
    )


def row(branch: Branch) -> tuple[str, str, str]:
    """Prompt, completion and mask of a branch, as text."""
    return (
        "".join(map(chr, branch.prompt_tokens)),
        "".join(map(chr, branch.completion_tokens)),
        "".join("1" if is_trained else "0" for is_trained in branch.loss_mask),
    )


def test_shared_turns_are_trained_once() -> None:
    session = Session("s")
    keep(session, "a", "b", version=3)
    keep(session, "abc", "d", version=4)
    keep(session, "abe", "f", version=5)
    assert [row(branch) for branch in session.branches()] == [
        ("a", "bcd", "101"),
        ("a", "bef", "001"),
    ]
    assert [list(branch.calls) for branch in session.branches()] == [[0, 1], [0, 2]]
    assert [branch.policy_versions for branch in session.branches()] == [[3, 4, 4], [3, 5, 5]]
    assert session.branches()[0].logprobs == [-ord("b") / 8, 0.0, -ord("d") / 8]
    assert [branch.num_turns for branch in session.branches()] == [2, 2]


def test_a_call_that_continues_none_begins_a_tree() -> None:
    session = Session("s")
    keep(session, "a", "bc")
    # Says "b" again, but not "c": the tokens before are not those that were sampled.
    other = keep(session, "abx", "y")
    assert other.parent is None
    assert [row(branch) for branch in session.branches()] == [("a", "bc", "11"), ("abx", "y", "1")]


def test_a_prompt_that_adds_nothing_continues_nothing() -> None:
    session = Session("s")
    keep(session, "a", "b")
    # The same tokens as prompt and answer before, with no turn of anybody between.
    assert keep(session, "ab", "c").parent is None
    assert keep(session, "abx", "c").parent == 0


def test_of_two_beginnings_the_longer_one_is_continued() -> None:
    session = Session("s")
    keep(session, "ab", "c")
    keep(session, "abcd", "e")
    keep(session, "ab", "cd")
    assert keep(session, "abcdef", "g").parent == 1


def test_of_two_calls_with_the_same_tokens_the_newer_one_is_continued() -> None:
    session = Session("s")
    keep(session, "a", "b")
    keep(session, "a", "b")
    assert keep(session, "abc", "d").parent == 1


def test_calls_that_are_not_to_be_trained_give_tokens_without_a_mask() -> None:
    session = Session("s")
    keep(session, "a", "b", is_trained=False)
    keep(session, "abc", "d")
    keep(session, "judge", "no", is_trained=False)
    # The judge's answer is no row: nothing would learn from it.
    assert [row(branch) for branch in session.branches()] == [("a", "bcd", "001")]


def test_a_call_that_is_not_trained_still_ends_the_branch_of_one_that_is() -> None:
    session = Session("s")
    keep(session, "a", "b")
    keep(session, "abc", "d", is_trained=False)
    assert [row(branch) for branch in session.branches()] == [("a", "bcd", "100")]


def test_versions_are_those_of_each_token() -> None:
    session = Session("s")
    call = session.add([1], [2, 3, 4], [0.0] * 3, [(0, 7), (2, 9)], finish_reason="length")
    assert call.policy_versions() == [7, 7, 9]
    session.add([1, 2, 3, 4, 5], [6], [0.0], [(0, 11)], finish_reason="stop")
    (branch,) = session.branches()
    # What stands between two turns has the version of the first token after it.
    assert branch.policy_versions == [7, 7, 9, 11, 11]
    assert branch.finish_reason == "stop"


def test_log_probs_are_one_for_each_token() -> None:
    session = Session("s")
    with pytest.raises(ValueError, match="1 log-probs for 2 tokens"):
        session.add([1], [2, 3], [0.0], [(0, 1)], finish_reason="stop")
    assert session.calls == []


def test_rewards_of_calls_are_summed_over_a_branch() -> None:
    session = Session("s")
    keep(session, "a", "b")
    keep(session, "abc", "d")
    keep(session, "abe", "f")
    keep(session, "x", "y")
    session.set_rewards({0: 1.0, 1: 0.25, 3: -2.0})
    assert [session.reward_of(branch) for branch in session.branches()] == [1.25, 1.0, -2.0]
    del session.rewards[3]
    assert session.reward_of(session.branches()[2]) is None


@pytest.mark.parametrize("number", [-1, 1])
def test_a_reward_of_no_call_is_refused_and_no_other_is_kept(number: int) -> None:
    session = Session("s")
    keep(session, "a", "b")
    with pytest.raises(SessionError, match=f"call {number}, but session s has calls 0 to 0"):
        session.set_rewards({0: 1.0, number: 2.0})
    assert session.rewards == {}


# --- against a reference --------------------------------------------------------------------


@dataclass
class Kept:
    """A call as the reference keeps it: all tokens."""

    prompt: list[int]
    sampled: list[int]
    versions: list[int]
    is_trained: bool
    parent: int | None = None
    logprobs: list[float] = field(default_factory=list)


def reference_parent(calls: list[Kept], prompt: list[int]) -> int | None:
    best = None
    for number, call in enumerate(calls):
        whole = call.prompt + call.sampled
        begins = len(whole) < len(prompt) and prompt[: len(whole)] == whole
        if begins and (best is None or len(whole) >= len(calls[best].prompt + calls[best].sampled)):
            best = number
    return best


def reference_rows(calls: list[Kept]) -> list[tuple[object, ...]]:
    """Each row token by token: which call has sampled the token at that place, if any."""
    rows: list[tuple[object, ...]] = []
    done: set[int] = set()
    for number in range(len(calls)):
        if any(call.parent == number for call in calls):
            continue
        path, at = [], number
        while True:
            path.insert(0, at)
            if calls[at].parent is None:
                break
            at = calls[at].parent  # type: ignore[assignment]
        leaf, root = calls[number], calls[path[0]]
        tokens = leaf.prompt + leaf.sampled
        start = len(root.prompt)
        drawn = {
            len(calls[one].prompt) + place: (one, place)
            for one in path
            for place in range(len(calls[one].sampled))
        }
        mask, logprobs, versions = [], [], []
        for place in range(start, len(tokens)):
            one, offset = drawn[min(other for other in drawn if other >= place)]
            versions.append(calls[one].versions[offset])
            is_drawn = place in drawn
            logprobs.append(calls[one].logprobs[offset] if is_drawn else 0.0)
            mask.append(is_drawn and calls[one].is_trained and one not in done)
        done |= {one for one in path if calls[one].is_trained}
        if any(mask):
            rows.append((path, tokens[:start], tokens[start:], mask, logprobs, versions))
    return rows


# Two letters and short texts: many prompts begin with other calls by chance as well.
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=3)
CALLS = st.lists(
    st.tuples(st.none() | st.integers(0, 30), TOKENS, TOKENS, st.integers(0, 2), st.booleans()),
    max_size=10,
)


@given(CALLS)
def test_branches_are_those_of_a_reference_that_keeps_all_tokens(
    given_calls: list[tuple[int | None, list[int], list[int], int, bool]],
) -> None:
    session, kept = Session("s"), list[Kept]()
    for number, (before, more, sampled, switch, is_trained) in enumerate(given_calls):
        # One prompt continues an earlier call, where there is one; another begins anew.
        beginning: list[int] = []
        if before is not None and kept:
            earlier = kept[before % len(kept)]
            beginning = earlier.prompt + earlier.sampled
        one = Kept(
            beginning + more,
            sampled,
            [2 * number + (place >= switch) for place in range(len(sampled))],
            is_trained,
            logprobs=[-(16 * number + place) / 4 for place in range(len(sampled))],
        )
        one.parent = reference_parent(kept, one.prompt)
        starts = [place for place in (0, switch) if place < len(sampled)]
        spans = sorted({place: one.versions[place] for place in starts}.items())
        call = session.add(
            one.prompt,
            sampled,
            one.logprobs,
            spans,
            finish_reason="stop",
            is_trained=is_trained,
        )
        kept.append(one)
        assert call.parent == one.parent
        assert session.tokens(call) == one.prompt + sampled
        assert call.policy_versions() == one.versions
    found = [
        (
            list(branch.calls),
            branch.prompt_tokens,
            branch.completion_tokens,
            branch.loss_mask,
            branch.logprobs,
            branch.policy_versions,
        )
        for branch in session.branches()
    ]
    assert found == reference_rows(kept)
    # Each token that is to be trained is so in exactly one row.
    trained = sum(map(sum, (branch.loss_mask for branch in session.branches())))
    assert trained == sum(len(one.sampled) for one in kept if one.is_trained)
