import math

import pytest
import torch

from wsi_mil.lookup import find_model
from wsi_mil.models.acmil import branch_similarity


def test_gated_form_all_terms_and_all_gradients(vectors, batch_of, criterion, close, terms_of, same_gradients):
    v = vectors("acmil_ga_eval")
    model = find_model("acmil").from_official(v.under("w/"))
    batch = batch_of(v["x"][0])
    output = model(batch)
    assert model.n_branches == 5
    close(output.logits, v["slide_preds"])
    close(output.auxiliary["branch_logits"][0], v["sub_preds"])
    close(output.attention_logits.T, v["attn_logits"][0])
    close(model.instance_scores(output, "attention"), v["bag_attn"][0])
    close(model.instance_scores(output, "attention") * 23, v["heatmap"])
    close(output.auxiliary["bag_feature"], v["bag_feat"])
    terms = terms_of(model.objective(criterion(3)), model, batch, v["label"])
    close(terms["bag"], v["loss_slide"])
    close(terms["branches"], v["loss_sub"])
    close(terms["diversity"], v["loss_div"])
    close(sum(terms.values()), v["loss"])
    same_gradients(model, find_model("acmil").from_official(v.under("g/")))


@pytest.mark.parametrize("case", range(6))
def test_masked_training_step(case, vectors, batch_of, criterion, close, terms_of):
    v = vectors("acmil_ga_train_stkim")
    t = v.under(f"t{case}_")
    n, k, p = t["NKp"].tolist()
    model = find_model("acmil").from_official(v.under("w/"), top_k=int(k), mask_drop=p).train()
    batch, mask = batch_of(t["x"][0]), t["masked"][0].T
    output = model(batch, forced_mask=mask)
    close(output.auxiliary["unmasked_attention_logits"].T, t["attn_logits_unmasked"][0])
    close(output.attention.T, t["attn"][0])
    close(output.logits, t["slide_preds"])
    close(output.auxiliary["branch_logits"][0], t["sub_preds"])
    terms = terms_of(model.objective(criterion(3)), model, batch, torch.tensor([1]), forced_mask=mask)
    close(terms["bag"], t["loss_slide"])
    close(terms["branches"], t["loss_sub"])
    close(terms["diversity"], t["loss_div"])
    close(sum(terms.values()), t["loss"])
    ours = model(batch, generator=torch.Generator().manual_seed(0)).auxiliary["stkim_mask"]
    assert ours.sum(dim=0).tolist() == mask.sum(dim=0).tolist() == [int(min(n, k) * p)] * 5


def test_one_branch_is_the_bag_term_alone(vectors, batch_of, criterion, close, terms_of, same_gradients):
    v = vectors("acmil_ga_m1")
    model = find_model("acmil").from_official(v.under("w/"), top_k=0)
    batch = batch_of(v["x"][0])
    output = model(batch)
    close(output.logits, v["slide_preds"])
    close(output.auxiliary["branch_logits"][0], v["sub_preds"])
    close(output.attention_logits.T, v["attn_logits"][0])
    terms = terms_of(model.objective(criterion(3)), model, batch, torch.tensor([1]))
    assert list(terms) == ["bag"]
    close(terms["bag"], v["loss"])
    same_gradients(model, find_model("acmil").from_official(v.under("g/")))


def test_multi_head_form_all_terms_and_all_gradients(vectors, batch_of, criterion, close, terms_of, same_gradients):
    v = vectors("acmil_mha_eval")
    model = find_model("acmil").from_official(v.under("w/"))
    batch = batch_of(v["x"][0])
    output = model(batch)
    close(output.logits, v["slide_preds"])
    close(output.auxiliary["branch_logits"][0], v["sub_preds"])
    close(output.attention_logits.reshape(23, 3, 8).permute(2, 1, 0), v["attn_logits"])
    terms = terms_of(model.objective(criterion(3)), model, batch, v["label"])
    close(terms["bag"], v["loss_slide"])
    close(terms["branches"], v["loss_sub"])
    close(terms["diversity"], v["loss_div"])
    close(sum(terms.values()), v["loss"])
    same_gradients(model, find_model("acmil").from_official(v.under("g/")))


@pytest.mark.parametrize(("n", "branches", "classes"), [(1, 2, 2), (3, 4, 5), (40, 1, 1)])
def test_multi_head_algebra_equals_keys_and_values_for_each_tile(n, branches, classes, batch_of):
    model = find_model("acmil")(
        in_dim=12, n_outputs=classes, variant="multi_head", n_branches=branches, hidden=16
    ).double()
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(n, 12, dtype=torch.float64)
    output = model.eval()(batch_of(x))
    h = model.features(x)
    parts = model.branches
    weights = []
    for m in range(branches):
        q = parts.attention[m].query(parts.queries[m]).reshape(8, 1, 2)
        k = parts.attention[m].key(h).reshape(n, 8, 2).transpose(0, 1)
        weights.append((q @ k.transpose(1, 2) / math.sqrt(2)).softmax(dim=-1))
    for m, values in enumerate([*parts.values, parts.bag_values]):
        a = weights[m] if m < branches else torch.stack(weights).mean(dim=0)
        attended = a @ values.value(h).reshape(n, 8, 2).transpose(0, 1)
        naive = values.norm(values.out(attended.transpose(0, 1).reshape(1, 16)))
        ours = output.bag_embedding[:, m] if m < branches else output.auxiliary["bag_feature"]
        torch.testing.assert_close(ours, naive, rtol=1e-10, atol=1e-10)


def test_masks_lie_in_the_top_k_of_each_bag_and_keep_ratios(batch_of):
    model = find_model("acmil")(in_dim=8, n_outputs=2, n_branches=3, top_k=4, mask_drop=0.5).train()
    batch = batch_of(torch.randn(9, 8), torch.randn(3, 8), torch.randn(1, 8))
    output = model(batch, generator=torch.Generator().manual_seed(4))
    mask, logits = output.auxiliary["stkim_mask"], output.auxiliary["unmasked_attention_logits"]
    for start, end, count in ((0, 9, 2), (9, 12, 1), (12, 13, 0)):
        top = logits[start:end].topk(min(4, end - start), dim=0).indices
        allowed = torch.zeros_like(mask[start:end]).scatter_(0, top, True)
        assert not (mask[start:end] & ~allowed).any()
        assert mask[start:end].sum(dim=0).tolist() == [count] * 3
        kept = ~mask[start:end, 0]
        plain = logits[start:end, 0].softmax(dim=0)[kept]
        torch.testing.assert_close(output.attention[start:end, 0][kept], plain / plain.sum())


def test_masking_is_drawn_from_all_of_the_top_k(batch_of):
    model = find_model("acmil")(in_dim=8, n_outputs=2, n_branches=2, top_k=5, mask_drop=0.4).train()
    batch, counts = batch_of(torch.randn(12, 8)), torch.zeros(12, 2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        counts += model(batch, generator=generator).auxiliary["stkim_mask"]
    shares = counts[counts > 0].reshape(5, 2) / 400
    assert ((shares - 0.4).abs() < 0.1).all()


def test_bernoulli_masks_a_variable_count(batch_of):
    model = find_model("acmil")(in_dim=8, n_outputs=2, masking="bernoulli").train()
    batch, generator = batch_of(torch.randn(30, 8)), torch.Generator().manual_seed(0)
    counts = torch.stack([model(batch, generator=generator).auxiliary["stkim_mask"].sum(0) for _ in range(80)]).float()
    assert len(counts.unique()) > 4
    assert abs(counts.mean().item() - 6) < 0.3


def test_diversity_is_one_for_copies_and_zero_for_disjoint_branches():
    offsets = torch.tensor([0, 4])
    column = torch.tensor([0.5, 0.3, 0.2, 0.0])
    assert branch_similarity(torch.stack([column, column], 1), offsets, 2).item() == pytest.approx(1)
    apart = torch.tensor([[0.5, 0.0], [0.5, 0.0], [0.0, 0.1], [0.0, 0.9]])
    assert branch_similarity(apart, offsets, 2).item() == 0
