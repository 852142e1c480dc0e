"""Encoders do what their authors' contracts say, and refuse what they cannot do before any slide is opened."""

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from wsi_mil.encoders import (
    DEFAULT_ENCODER,
    NOT_SUPPORTED,
    Declaration,
    Encoder,
    Transform,
    encoder_lines,
    encoder_names,
    find_declaration,
    open_encoder,
)
from wsi_mil.encoders._weights import digest, load_strictly, read_state_dict
from wsi_mil.errors import ConfigError

PUBLISHED_PARAMETERS = {
    "uni": 303_350_784,
    "uni2_h": 681_394_176,
    "virchow": 631_229_184,
    "virchow2": 631_239_424,
    "prov_gigapath": 1_134_953_984,
    "h_optimus_0": 1_134_774_272,
    "h_optimus_1": 1_134_774_272,
    "h0_mini": 85_739_520,
    "lunit_vits16": 21_665_664,
    "lunit_vits8": 21_670_272,
    "phikon": 85_798_656,
    "tf_efficientnet_lite0": 3_371_008,
}


def on_meta(declared: Declaration) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(declared.architecture, num_classes=0, **declared.arguments).eval()


def encoder_of(module: nn.Module, **changes) -> Encoder:
    fields = {
        "name": "test",
        "module": module.eval(),
        "transform": Transform(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
        "dim": 8,
        "output": "pooled",
        "mpp": (),
        "tile_px": None,
        "weights_sha256": "",
        "licence": "",
        "gated": False,
        "pathology": False,
        "label": "",
    }
    return Encoder(**(fields | changes))


def tiles(n: int, side: int = 224, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (n, side, side, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_every_declared_encoder_has_its_published_size():
    assert set(encoder_names()) == set(PUBLISHED_PARAMETERS)


@pytest.mark.parametrize("name", sorted(PUBLISHED_PARAMETERS))
def test_a_declared_architecture_gives_the_declared_vector(name):
    declared = find_declaration(name)
    module = on_meta(declared)
    assert sum(parameter.numel() for parameter in module.parameters()) == PUBLISHED_PARAMETERS[name]
    encoder = encoder_of(module, output=declared.output)
    side = declared.transform.input_px or 224
    out = encoder._output(module(torch.empty(2, 3, side, side, device="meta")))
    assert tuple(out.shape) == (2, declared.dim)
    assert declared.transform.input_px in (None, declared.tile_px)
    assert declared.pathology == bool(declared.mpp)


@pytest.mark.parametrize(("name", "prefix"), [("virchow", 1), ("virchow2", 5)])
def test_virchow_is_class_token_and_mean_of_patches_without_registers(name, prefix):
    declared = find_declaration(name)
    module = on_meta(declared)
    assert module.num_prefix_tokens == prefix
    tokens = torch.arange(2 * (prefix + 4) * 3, dtype=torch.float32).reshape(2, prefix + 4, 3)
    expected = torch.stack([torch.cat([row[0], row[prefix:].mean(0)]) for row in tokens])
    assert torch.equal(encoder_of(module, output=declared.output)._output(tokens), expected)


@pytest.mark.parametrize("name", [name for name in PUBLISHED_PARAMETERS if name != DEFAULT_ENCODER])
def test_a_class_token_encoder_gives_the_class_token(name):
    declared = find_declaration(name)
    if declared.output != "cls":
        assert declared.output == "cls+mean"
        return
    small = {**declared.arguments, "depth": 1}
    torch.manual_seed(0)
    module = timm.create_model(declared.architecture, num_classes=0, **small).eval()
    images = torch.randn(1, 3, 224, 224)
    with torch.inference_mode():
        expected = module.forward_features(images)[:, 0]
        assert torch.equal(encoder_of(module, output="cls")._output(module(images)), expected)


def test_the_default_is_called_an_imagenet_encoder_wherever_it_is_offered():
    encoder = open_encoder()
    assert encoder.name == DEFAULT_ENCODER
    assert encoder.label == "ImageNet encoder, not a pathology one"
    assert not encoder.pathology
    line = next(line for line in encoder_lines() if line.startswith(DEFAULT_ENCODER))
    assert "(default): ImageNet encoder, not a pathology one" in line


def test_the_bundled_weights_tell_pictures_apart_and_match_timm():
    encoder = open_encoder()
    module = timm.create_model(
        DEFAULT_ENCODER, num_classes=0, checkpoint_path=find_declaration(DEFAULT_ENCODER).bundled
    ).eval()
    batch = tiles(3)
    with torch.inference_mode():
        expected = module((batch.permute(0, 3, 1, 2) / 255 - 0.5) / 0.5)
    torch.testing.assert_close(encoder.encode_batch(batch), expected, rtol=1e-4, atol=1e-5)
    assert (encoder.encode_batch(batch)[0] - encoder.encode_batch(batch)[1]).abs().max() > 0.01


def test_names_may_have_hyphens_and_unknown_ones_are_refused_with_the_list():
    assert find_declaration("UNI2-h") is find_declaration("uni2_h")
    with pytest.raises(ConfigError, match=r"no such name.*prov_gigapath"):
        open_encoder("unii")


@pytest.mark.parametrize("name", sorted(NOT_SUPPORTED))
def test_what_timm_cannot_open_is_refused_with_the_reason(name):
    assert name not in encoder_names()
    with pytest.raises(ConfigError, match="not supported"):
        open_encoder(name)
    assert any(line.startswith(f"not supported: {name}: ") for line in encoder_lines())


def test_a_users_own_declaration_is_opened_from_its_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from wsi_mil.encoders import Declaration, Transform\n"
        "ENCODER = Declaration(architecture='resnet18', hub_id=None, dim=512, mpp=(1.0,), tile_px=64,\n"
        "    transform=Transform(mean=(0.5,) * 3, std=(0.5,) * 3), licence='mine', gated=False, pathology=True,\n"
        "    label='mine', source='here')\n"
    )
    torch.manual_seed(0)
    save_file(timm.create_model("resnet18", num_classes=0).state_dict(), tmp_path / "w.safetensors")
    encoder = open_encoder(str(file), weights=tmp_path / "w.safetensors")
    assert (encoder.name, encoder.mpp, encoder.encode_batch(tiles(2, 64)).shape) == ("mine", (1.0,), (2, 512))


def test_the_same_weights_have_one_digest_whichever_file_they_came_from(tmp_path):
    torch.manual_seed(1)
    module = timm.create_model("resnet18", num_classes=0)
    save_file(module.state_dict(), tmp_path / "a.safetensors")
    torch.save({"state_dict": {f"module.{k}": v for k, v in module.state_dict().items()}}, tmp_path / "b.pth")
    a = open_encoder("timm:resnet18", weights=tmp_path / "a.safetensors")
    b = open_encoder("timm:resnet18", weights=tmp_path / "b.pth")
    assert a.weights_sha256 == b.weights_sha256 == digest(module)
    with torch.no_grad():
        module.conv1.weight[0, 0, 0, 0] += 1e-3
    assert digest(module) != a.weights_sha256


def test_a_classifier_in_the_file_is_left_out(tmp_path):
    torch.manual_seed(2)
    full = timm.create_model("resnet18", num_classes=7)
    save_file(full.state_dict(), tmp_path / "full.safetensors")
    encoder = open_encoder("timm:resnet18", weights=tmp_path / "full.safetensors")
    assert encoder.dim == 512
    assert torch.equal(encoder.module.state_dict()["conv1.weight"], full.conv1.weight)


def test_a_folder_with_a_timm_configuration_is_opened_without_a_network(tmp_path):
    from timm.models import save_for_hf

    torch.manual_seed(3)
    module = timm.create_model("resnet18", num_classes=3)
    save_for_hf(module, tmp_path, safe_serialization=True)
    encoder = open_encoder(f"timm:local-dir:{tmp_path}")
    assert encoder.name == f"timm:local-dir:{tmp_path.name}"
    assert encoder.dim == 512
    assert torch.equal(encoder.module.state_dict()["conv1.weight"], module.conv1.weight)


def test_weights_of_another_architecture_are_named_and_nothing_is_changed():
    module = timm.create_model("resnet18", num_classes=0)
    before = digest(module)
    with pytest.raises(ConfigError, match=r"another architecture.*Missing.*Unexpected.*Nothing was changed"):
        load_strictly(module, timm.create_model("tf_efficientnet_lite0", num_classes=0).state_dict(), what="w")
    with pytest.raises(ConfigError, match=r"Other shape .*layer1.0.conv1.weight"):
        load_strictly(module, timm.create_model("resnet50", num_classes=0).state_dict(), what="w")
    assert digest(module) == before


class Payload:
    def __reduce__(self):
        return print, ("code was executed",)


@pytest.mark.parametrize("content", ["pickled code", "no tensors", "damaged", "missing"])
def test_a_file_that_is_no_weights_is_refused_without_executing_it(tmp_path, content, capsys):
    path = tmp_path / "w.pth"
    if content == "pickled code":
        torch.save({"a": Payload()}, path)
    elif content == "no tensors":
        torch.save({"epoch": 3}, path)
    elif content == "damaged":
        path.write_bytes(b"no weights")
    with pytest.raises(ConfigError, match=r"w\.pth"):
        read_state_dict(path)
    assert "executed" not in capsys.readouterr().out


def test_an_unknown_timm_name_is_refused_with_near_ones():
    with pytest.raises(ConfigError, match=r"no such network. Near: .*resnet18"):
        open_encoder("timm:resnet1888")


def test_a_breach_of_the_contract_is_seen_at_the_pixel_size_the_network_sees():
    encoder = encoder_of(
        nn.Identity(),
        mpp=(0.5, 1.0),
        tile_px=224,
        transform=Transform(mean=(0, 0, 0), std=(1, 1, 1), input_px=224),
    )
    assert encoder.breaches(tile_px=224, mpp=0.5) == {}
    assert encoder.breaches(tile_px=224, mpp=0.54) == {}
    assert set(encoder.breaches(tile_px=224, mpp=0.56)) == {"mpp"}
    assert encoder.breaches(tile_px=224, mpp=1.09) == {}
    assert set(encoder.breaches(tile_px=256, mpp=0.5)) == {"mpp", "tile_px"}  # 256 px seen as 224 are 0.571 µm/px
    assert set(encoder.breaches(tile_px=448, mpp=0.25)) == {"tile_px"}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_agrees_with_single(precision):
    encoder = open_encoder()
    single, half = encoder.encode_batch(tiles(2, 96)), encoder.encode_batch(tiles(2, 96), precision=precision)
    assert half.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(single, half).min() > 0.99
    assert not torch.equal(single, half)


@pytest.mark.parametrize(
    ("text", "words"),
    [("import nothing_like_it", "ModuleNotFoundError"), ("def", "SyntaxError"), ("a = 1", "defines no ENCODER")],
)
def test_a_mistake_in_a_users_own_declaration_is_named(tmp_path, text, words):
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"mine.py.*{words}"):
        open_encoder(str(file))
    with pytest.raises(ConfigError, match="no such file"):
        open_encoder(str(tmp_path / "absent.py"))


@pytest.mark.parametrize(
    ("name", "near"), [("uni_2h", "uni2_h"), ("Virchow-2x", "virchow2"), ("conch_v15", "conch_v1_5")]
)
def test_an_unknown_name_is_refused_with_the_nearest(name, near):
    with pytest.raises(ConfigError, match=f"Did you mean {near!r}"):
        open_encoder(name)
