import pytest
import torch

from wsi_mil.errors import ConfigError
from wsi_mil.lookup import find_model, find_regulariser


@pytest.mark.parametrize("form", ["gated", "plain"])
def test_amlab_pooling_and_likelihood(form, vectors, batch_of, criterion, close):
    v = vectors(f"abmil_{form}_amlab")
    model = find_model("abmil").from_official(v.under("w/"))
    output = model(batch_of(v["H"]))
    assert model.gated == (form == "gated")
    assert model.feature_layer is False
    close(output.attention.T, v["A"])
    close(output.bag_embedding[0], v["Z"])
    close(output.logits.sigmoid(), v["Y_prob"])
    for y in (0, 1):
        close(criterion(1)(output.logits, torch.tensor([y])), v[f"nll_y{y}"].reshape(()))


def test_feature_version_with_aem_and_all_gradients(vectors, batch_of, criterion, close, terms_of, same_gradients):
    v = vectors("abmil_gated_feat")
    model = find_model("abmil").from_official(v.under("w/"))
    batch = batch_of(v["x"][0])
    output = model(batch)
    close(output.logits, v["logits"])
    close(output.attention_logits.T, v["attn_logits"][0])
    objective = find_regulariser("aem")(model.objective(criterion(3)), weight=0.1)
    terms = terms_of(objective, model, batch, v["label"])
    close(terms["bag"], v["ce"])
    close(terms["aem"], 0.1 * v["div"])
    close(sum(terms.values()), v["loss"])
    same_gradients(model, find_model("abmil").from_official(v.under("g/")))


def test_multi_head_form_with_aem_and_all_gradients(vectors, batch_of, criterion, close, terms_of, same_gradients):
    v = vectors("aem_mha")
    model = find_model("abmil_mha").from_official(v.under("w/"))
    batch = batch_of(v["x"][0])
    output = model(batch)
    close(output.logits, v["logits"])
    close(output.attention_logits.T, v["attn_logits"][:, 0])
    objective = find_regulariser("aem")(model.objective(criterion(3)), weight=0.1)
    terms = terms_of(objective, model, batch, v["label"])
    close(terms["aem"], 0.1 * v["div"])
    close(sum(terms.values()), v["loss"])
    same_gradients(model, find_model("abmil_mha").from_official(v.under("g/")))


def test_official_weights_come_in_eval_mode_and_in_containers(vectors):
    weights = vectors("abmil_gated_feat").under("w/")
    wrapped = {"model": {f"module.{name}": value for name, value in weights.items()}, "epoch": 3}
    model = find_model("abmil").from_official(wrapped)
    assert not model.training
    assert torch.equal(model.head.weight, weights["classifier.fc.weight"])


def test_official_keys_that_are_left_or_missing_are_named(vectors):
    weights = vectors("abmil_gated_amlab").under("w/")
    cnn = weights | {"feature_extractor_part1.0.weight": torch.zeros(2)}
    with pytest.raises(ConfigError, match=r"feature_extractor_part1\.0\.weight"):
        find_model("abmil").from_official(cnn)
    find_model("abmil").from_official(cnn, ignore=("feature_extractor_part*",))
    del weights["attention_w.bias"]
    with pytest.raises(ConfigError, match=r"attention_w\.bias"):
        find_model("abmil").from_official(weights)
