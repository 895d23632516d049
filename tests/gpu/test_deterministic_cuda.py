"""Whether a GPU gives the same bits for the same update, where a run asks for it.

Plain pytest: no plugins there.
"""

# What the machine lacks is a reason to skip, and that must be known before the imports.

import os
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("pydantic", reason="pydantic is not installed: pip install 'pydantic>=2.12'")
pytest.importorskip("transformers", reason="transformers is not installed")

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch, with_shared_prompts
from support.updates import update_whole

from rolemesh.engine.hardware.devices import be_deterministic
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.specs import ModelSpec, OptimizerSpec, SftLossSpec
from rolemesh.engine.train.trainer import Trainer

pytestmark = pytest.mark.gpu


@pytest.fixture
def deterministic():
    names = ("CUBLAS_WORKSPACE_CONFIG", "VLLM_BATCH_INVARIANT")
    before = {name: os.environ.get(name) for name in names}
    device = torch.device("cuda", 0)
    be_deterministic(device, True)
    yield device
    be_deterministic(device, False)
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("share_prefixes", ["auto", "never"])
def test_the_same_update_has_the_same_bits(deterministic, tmp_path, numerics, share_prefixes):
    folder = write_tiny_llama(tmp_path / "tiny")
    # Enough rows that sums by atomics would meet in another order.
    batch = with_shared_prompts(
        token_batch(prompt_lengths=[40] * 64, completion_lengths=[60] * 64), 8
    )
    found = []
    for _ in range(3):
        torch.manual_seed(0)
        spec = ModelSpec(path=folder, micro_batch_tokens=4096, share_prefixes=share_prefixes)
        model = CausalLm(spec, device=deterministic, numerics=numerics)
        trainer = Trainer(model, OptimizerSpec(learning_rate=1e-3))
        update_whole(trainer, batch, SftLossSpec(), epochs=1, mini_batch_rows=32, seed=5)
        found.append({name: weight.cpu() for name, weight in trainer.named_weights()})
    for again in found[1:]:
        assert all(torch.equal(again[name], weight) for name, weight in found[0].items())
