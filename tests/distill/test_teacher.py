"""The target's hidden states, and what is not computed for them."""

import pytest
import torch

from draftkv.distill.student import Teacher
from draftkv.rehearsal import ARCHITECTURES, tiny_model


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_supervised_rows_are_those_of_the_whole_forward(name):
    model = tiny_model(name).eval()
    ids = torch.randint(0, 500, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        want = model.get_decoder()(torch.tensor([ids[:-1]]), use_cache=False).last_hidden_state[0, 40:]
    fed, mlp = [], getattr(model.get_decoder().layers[-1], "mlp", None)
    teacher = Teacher(model)
    if mlp is not None:
        mlp.register_forward_pre_hook(lambda _, args: fed.append(args[0].shape[1]))
    got = teacher.hidden({"prompt_ids": ids[:40], "response_ids": ids[40:]})
    assert got.shape == want.shape and torch.allclose(got, want, atol=1e-5)
    assert fed == ([] if mlp is None else [19]), "the last layer's MLP reads no row of the prompt"
    with torch.no_grad():
        again = model.get_decoder()(torch.tensor([ids[:-1]]), use_cache=False).last_hidden_state[0, 40:]
    assert torch.equal(again, want), "outside of a signal the model is its own"
