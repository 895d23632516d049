import pytest
import torch
from support.tiny_models import tiny_tokenizer

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.rewards.sources import RewardInvalidError
from rolemesh.services.reward.outside_rows import RowReader


def batch(prompt, completion, metadata="{}"):
    return Experience(
        {
            "tokens": Column.ragged(ColumnKind.SEQUENCE, [[*prompt, *completion]], torch.int64),
            "prompt_lengths": Column(ColumnKind.ROW, torch.tensor([len(prompt)])),
            "prompt_text": Column.text(["<s>1+1="]),
            "completion_text": Column.text(["2"]),
            "answer": Column.text([""]),
            "metadata": Column.text([metadata]),
        }
    )


def test_a_query_has_the_special_tokens_of_the_completion_where_the_tokenizer_is_known(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    completion = [*tokenizer.encode("2", add_special_tokens=False), tokenizer.eos_token_id]
    (row,) = RowReader(str(tmp_path)).read(batch([7, 8], completion))
    assert row.query == "<s>1+1=" + tokenizer.decode(completion)
    assert row.query.endswith(tokenizer.eos_token)
    assert row.completion == "2"
    assert row.completion_tokens == tuple(completion)
    (plain,) = RowReader(None).read(batch([7, 8], completion))
    assert plain.query == "<s>1+1=2"


@pytest.mark.parametrize("metadata", ["[1]", "{", '"text"'])
def test_metadata_that_is_no_object_is_refused_with_the_row(metadata):
    with pytest.raises(RewardInvalidError, match="metadata of row 0"):
        RowReader(None).read(batch([1], [2], metadata))


def test_images_that_cannot_be_read_are_refused_with_the_row():
    given = batch([1], [2]) | Experience({"images": Column.text(["[{}]"])})
    with pytest.raises(RewardInvalidError, match=r"images of row 0: .* cannot be read"):
        RowReader(None).read(given)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"source\.tokenizer .* no tokenizer that can be read"):
        RowReader(str(tmp_path))
    with pytest.raises(ValueError, match="no folder"):
        RowReader("some/model-of-a-hub")
