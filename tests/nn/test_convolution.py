"""CausalConv1d calls the op with all that it was given, and has torch.nn.Conv1d's state dict."""

import pytest
import torch

import onepass
from onepass.nn import CausalConv1d


def test_it_calls_the_op_with_all_that_it_was_given():
    options = {"activation": None, "split": (8, 4), "l2_norm": (4, None), "eps": 0.1}
    layer = CausalConv1d(12, 3, **options)
    x, ends = torch.randn(1, 9, 12), torch.tensor((0, 4, 9), dtype=torch.int32)
    expected = onepass.causal_conv1d(x, layer.weight, layer.bias, cu_seqlens=ends, **options)
    assert all(map(torch.equal, layer(x, ends), expected))
    for name in options:
        other = CausalConv1d(12, 3, **{key: value for key, value in options.items() if key not in (name, "l2_norm")})
        assert getattr(other, name) != getattr(layer, name) or name == "l2_norm"
    plain = CausalConv1d(12, bias=False)
    assert torch.equal(plain(x), onepass.causal_conv1d(x, plain.weight))
    assert "kernel_size=3, activation=None, split=(8, 4), l2_norm=(4, None)" in repr(layer) and "bias=False" in repr(plain)


def test_its_state_dict_is_conv1ds():
    theirs = torch.nn.Conv1d(12, 12, 4, groups=12)
    ours = CausalConv1d(12, activation=None)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 7, 12)
    padded = torch.nn.functional.pad(x.transpose(1, 2), (3, 0))
    torch.testing.assert_close(ours(x), theirs(padded).transpose(1, 2))


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("kernel_size must be 2 to 8, but is 9", {"kernel_size": 9}),
        ("activation must be 'silu' or None, but is 'gelu'", {"activation": "gelu"}),
        ("split must be sizes above 0 that add up to channels, 12", {"split": (3, 3)}),
        ("l2_norm must be a head width that divides channels, 12", {"l2_norm": 5}),
        ("eps must be above 0", {"eps": 0.0}),
    ],
)
def test_what_it_can_not_be_is_named(words, options):
    with pytest.raises(ValueError, match=words):
        CausalConv1d(12, **options)
