import torch

from wsi_mil.fitting.randomness import seed_step


def test_a_step_draws_as_after_manual_seed_and_leaves_other_devices_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: (_ for _ in ()).throw(AssertionError("asked")))
    with torch.random.fork_rng(devices=[]):
        seed_step(7, torch.device("cpu"))
        drawn = torch.rand(5)
    expected = torch.rand(5, generator=torch.Generator().manual_seed(7))
    assert torch.equal(drawn, expected)
