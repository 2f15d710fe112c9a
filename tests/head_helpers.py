"""Heads for tests."""

from __future__ import annotations

from virnucpro.viral.head import EncoderInfo, HeadInfo

ENCODER = EncoderInfo(
    family="esm2",
    name="tiny, for the tests",
    encoder_id="0123456789abcdef",
    layer=3,
    pooling="bos",
    dim=6,
)
FACTS = HeadInfo(
    encoders=(ENCODER,),
    chunk_size=300,
    threshold=0.625,
    frame_rule="mean",
    exponent=0.375,
    training="not trained: random weights",
)
