"""Faults of feature extraction that other tools had: ENC-01, ENC-03, ENC-05."""

import pytest
import timm
import torch
from safetensors.torch import save_file

from wsi_mil.encoders import open_encoder
from wsi_mil.errors import ConfigError


def opened(name: str, folder, **options):
    torch.manual_seed(0)
    size = {"img_size": options["input_px"]} if options else {}
    save_file(timm.create_model(name, num_classes=0, **size).state_dict(), folder / "w.safetensors")
    return open_encoder(f"timm:{name}", weights=folder / "w.safetensors", **options)


def tiles(n: int, side: int) -> torch.Tensor:
    return torch.randint(0, 256, (n, side, side, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("tile_px", [224, 256, 512])
@pytest.mark.parametrize(("name", "seen"), [("vit_tiny_patch16_224", 224), ("resnet18", None)])
def test_enc_01_any_tile_size_is_taken_and_what_the_network_sees_is_recorded(tmp_path, name, seen, tile_px):
    encoder = opened(name, tmp_path)
    assert encoder.transform.input_px == seen
    encoder.probe(tile_px)
    text = encoder.transform.describe(tile_px)
    resized = seen not in (None, tile_px)
    assert (f"whole tile resized from {tile_px} to {seen} px" in text) == resized
    assert "no crop" in text
    assert (encoder.transform_digest(tile_px) == encoder.transform_digest(seen or tile_px)) is True


def test_enc_01_a_network_for_518_px_says_so_or_is_built_for_less(tmp_path):
    encoder = opened("vit_small_patch14_dinov2", tmp_path, input_px=224)
    assert encoder.transform.input_px == 224
    encoder.probe(224)


def test_enc_01_a_size_the_network_cannot_take_is_refused_before_any_slide(tmp_path):
    encoder = opened("resnet18", tmp_path)
    object.__setattr__(encoder, "dim", 9)
    with pytest.raises(ConfigError, match="not \\(9,\\)"):
        encoder.probe(64)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18"])
@pytest.mark.parametrize("tile_px", [224, 256])
def test_enc_03_the_rim_of_a_tile_is_seen(tmp_path, name, tile_px):
    encoder = opened(name, tmp_path)
    plain = tiles(1, tile_px)
    dark_rim = plain.clone()
    for edge in (slice(0, 16), slice(-16, None)):
        dark_rim[:, edge] = 0
        dark_rim[:, :, edge] = 0
    assert (encoder.encode_batch(plain) - encoder.encode_batch(dark_rim)).abs().max() > 1e-3


def test_enc_05_rows_agree_whatever_the_batch_size():
    encoder = open_encoder()
    batch = tiles(33, 96)
    whole = encoder.encode_batch(batch)
    for size in (1, 32):
        parts = torch.cat([encoder.encode_batch(part) for part in batch.split(size)])
        assert parts.shape == (33, 1280)
        torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)
