import torch

from wsi_mil.lookup import find_model


def test_mean_of_instances_is_mean_of_embeddings(vectors, batch_of, close):
    v = vectors("pooling_max_mean")
    model = find_model("mean_pool").from_official({"W": v["W"], "b": v["b"]})
    output = model(batch_of(v["h"]))
    close(output.logits[0], v["inst_mean"])
    close(output.logits[0], v["emb_mean_logits"])
    close(output.instance_logits, v["inst_logits"])
    for c in range(3):
        close(model.instance_scores(output, "probability", c), v["inst_logits"].softmax(dim=1)[:, c])
        close(model.instance_scores(output, "contribution", c), v["inst_logits"][:, c] / 13)


def test_maximum_of_instances_and_its_witness(vectors, batch_of, close):
    v = vectors("pooling_max_mean")
    model = find_model("max_pool").from_official({"W": v["W"], "b": v["b"]})
    output = model(batch_of(torch.zeros(2, 8), v["h"]))
    close(output.logits[1], v["inst_max"])
    assert (output.auxiliary["witness"][1] - 2).tolist() == v["inst_argmax"].tolist()
    assert not torch.allclose(output.logits[1], v["emb_max_logits"])
