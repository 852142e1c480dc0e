import pytest
import torch

from wsi_mil.lookup import find_model
from wsi_mil.models.focusmil import kl_to_standard_normal


def bags_of(v):
    return v["x"].split(torch.bincount(v["bag_idx"]).tolist())


def test_derivative_layout_terms_and_all_gradients(vectors, batch_of, criterion, close, terms_of, same_gradients):
    v = vectors("focusmil_derivative_arch")
    model = find_model("focusmil").from_official(v.under("w_"))
    batch = batch_of(*bags_of(v))
    output = model(batch, eps=v["eps"])
    close(output.auxiliary["mean"], v["mu"])
    close(output.auxiliary["log_var"], v["logvar"])
    close(output.auxiliary["latent"], v["z"])
    close(output.instance_logits[:, 0], v["inst_logits_train"])
    close(output.logits[:, 0], v["bag_logits_train"])
    assert (output.auxiliary["witness"][:, 0] - batch.offsets[:-1]).tolist() == v["argmax_train"].tolist()
    still = model(batch)
    close(still.instance_logits[:, 0], v["inst_logits_eval"])
    close(still.logits[:, 0], v["bag_logits_eval"])
    close(model.instance_scores(still, "probability", 1), v["inst_logits_eval"].sigmoid())
    objective = model.objective(criterion(1), kl_average="flat")
    terms = terms_of(objective, model, batch, v["y"].long(), eps=v["eps"])
    close(terms["bag"], v["bce"])
    close(terms["kl"], 0.01 * v["kl_mean"])
    close(sum(terms.values()), v["loss_kl0_01"])
    same_gradients(model, find_model("focusmil").from_official(v.under("g_")))


def test_sum_over_dimensions(vectors, batch_of, criterion, close, terms_of):
    v = vectors("focusmil_derivative_arch")
    model = find_model("focusmil").from_official({f"w_{k}": t for k, t in v.under("w_").items()})
    objective = model.objective(criterion(1), kl_weight=1.0, kl_average="flat", kl_reduction="sum")
    terms = terms_of(objective, model, batch_of(*bags_of(v)), v["y"].long(), eps=v["eps"])
    close(terms["kl"], v["kl_sum_dims_mean_inst"])


def reference(vectors):
    v = vectors("focusmil_reference_NOT_OFFICIAL")
    names = ("Wm", "bm", "Wv", "bv", "wc", "bc")
    return v, find_model("focusmil").from_official({name: v[name] for name in names})


def test_closed_form_in_double_precision(vectors, batch_of, criterion, close, terms_of):
    v, model = reference(vectors)
    batch = batch_of(*(v[f"b{i}_x"] for i in range(3)))
    eps = torch.cat([v[f"b{i}_eps"] for i in range(3)])
    output, still = model(batch, eps=eps), model(batch)
    close(output.logits[:, 0], v["bag_logits_train"], 1e-12)
    starts = batch.offsets[:-1].tolist()
    for i, start in enumerate(starts):
        rows = slice(start, start + len(v[f"b{i}_x"]))
        close(output.auxiliary["latent"][rows], v[f"b{i}_z"], 1e-12)
        close(output.instance_logits[rows, 0], v[f"b{i}_inst_logit_train"], 1e-12)
        close(still.instance_logits[rows, 0], v[f"b{i}_inst_logit_eval"], 1e-12)
        close(still.logits[i, 0], v[f"b{i}_bag_logit_eval"], 1e-12)
        assert output.auxiliary["witness"][i, 0] - start == v[f"b{i}_argmax_train"]
        assert still.auxiliary["witness"][i, 0] - start == v[f"b{i}_argmax_eval"]
        divergence = kl_to_standard_normal(v[f"b{i}_mu"], v[f"b{i}_logvar"]).sum(dim=1)
        close(divergence, v[f"b{i}_kl_per_instance"], 1e-12)
    y = v["y"].long()
    for beta in ("0.001", "0.01", "1"):
        objective = model.objective(criterion(1), kl_weight=float(beta), kl_average="flat", kl_reduction="sum")
        terms = terms_of(objective, model, batch, y, eps=eps)
        close(terms["bag"], v["bce_mean"], 1e-12)
        close(sum(terms.values()), v[f"loss_beta{beta}_klmeaninst"], 1e-12)
    per_bag = model.objective(criterion(1), kl_weight=1.0, kl_reduction="sum")
    close(terms_of(per_bag, model, batch, y, eps=eps)["kl"], v["kl_mean_per_bag"], 1e-12)


def test_kl_equals_torch_distributions_and_is_zero_at_the_prior(vectors, close):
    v = vectors("focusmil_reference_NOT_OFFICIAL")
    close(kl_to_standard_normal(v["k_mu"], v["k_logvar"]).sum(dim=1), v["k_kl"], 1e-12)
    assert kl_to_standard_normal(torch.zeros(3), torch.zeros(3)).tolist() == [0, 0, 0]


def test_without_kl_only_the_witness_gets_a_gradient(vectors, batch_of, criterion, close):
    v, model = reference(vectors)
    x = v["b2_x"].clone().requires_grad_()
    criterion(1)(model(batch_of(x)).logits, torch.tensor([1])).backward()
    touched = x.grad.abs().sum(dim=1).nonzero().flatten().tolist()
    assert touched == [v["b2_argmax_eval"].item()]
    close(x.grad, v["b2_xgrad_beta0_eval"], 1e-12)


def test_more_tiles_can_only_raise_the_logit_and_the_runner_up_follows(batch_of):
    model = find_model("focusmil")(in_dim=6, n_outputs=1, latent_dim=4).eval()
    x = torch.randn(30, 6)
    whole = model(batch_of(x))
    witness = whole.auxiliary["witness"].item()
    without = model(batch_of(torch.cat([x[:witness], x[witness + 1 :]])))
    assert without.logits < whole.logits
    torch.testing.assert_close(without.logits.flatten(), whole.instance_logits.flatten().sort().values[-2:-1])
    torch.testing.assert_close(model(batch_of(torch.cat([x, x]))).logits, whole.logits)


def test_logits_are_pooled_without_a_second_sigmoid(batch_of, criterion, vectors):
    model = find_model("focusmil")(in_dim=4, n_outputs=1, hidden=(), latent_dim=1).eval()
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0)
    torch.nn.init.constant_(model.head.bias, 20.0)
    loss = criterion(1)(model(batch_of(torch.zeros(2, 4))).logits, torch.tensor([1]))
    assert loss.item() < 1e-6 < vectors("focusmil_derivative_arch")["double_sigmoid_floor_pos"].item()


def test_extreme_log_variances_stay_finite(batch_of):
    model = find_model("focusmil")(in_dim=4, n_outputs=1, hidden=(), latent_dim=3).train()
    torch.nn.init.constant_(model.log_var.bias, 1e4)
    output = model(batch_of(torch.randn(5, 4)), generator=torch.Generator().manual_seed(0))
    assert output.logits.isfinite().all()
    assert output.auxiliary["log_var"].max().item() == 10


def test_several_classes_have_a_maximum_each(batch_of):
    model = find_model("focusmil")(in_dim=5, n_outputs=3).eval()
    output = model(batch_of(torch.randn(8, 5), torch.randn(1, 5)))
    assert torch.equal(output.logits[0], output.instance_logits[:8].amax(dim=0))
    probabilities = torch.stack([model.instance_scores(output, "probability", c) for c in range(3)])
    torch.testing.assert_close(probabilities.sum(dim=0), torch.ones(9))


@pytest.mark.parametrize("seed", [0, 1])
def test_noise_comes_from_the_generator(seed, batch_of):
    model = find_model("focusmil")(in_dim=5, n_outputs=1).train()
    batch = batch_of(torch.randn(8, 5))
    output = model(batch, generator=torch.Generator().manual_seed(seed))
    eps = torch.randn(8, 35, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(output.logits, model(batch, eps=eps).logits)
