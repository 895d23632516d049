"""pass@k against every choice of k completions."""

import itertools

import pytest
import torch

from rolemesh.engine.rewards.pass_at import pass_at


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pass_at_k_is_the_share_of_choices_with_a_right_completion(k):
    rows = {5: [True, False, False, True, False], 2: [False] * 4, 9: [True] * 4}
    expected = []
    for passes in rows.values():
        choices = list(itertools.combinations(passes, k))
        expected.append(sum(any(choice) for choice in choices) / len(choices))
    ids = [prompt for prompt, passes in rows.items() for _ in passes]
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))
    flat = torch.tensor([one for passes in rows.values() for one in passes])
    found = pass_at(flat[order], torch.tensor(ids)[order], [k])
    assert found == {f"pass@{k}": pytest.approx(sum(expected) / len(expected))}


def test_a_prompt_with_fewer_rows_than_k_is_refused():
    with pytest.raises(ValueError, match=r"pass_at has 2, but prompt 4 has 1 rows"):
        pass_at(torch.tensor([True, True, True]), torch.tensor([3, 3, 4]), [1, 2])


def test_a_k_below_one_is_refused():
    with pytest.raises(ValueError, match="pass_at has 0"):
        pass_at(torch.tensor([True]), torch.tensor([3]), [0])
