"""The stages of transformers' models make the kernel calls of the plain model."""

import pytest
import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.integrations import flex_attention
from transformers.masking_utils import create_bidirectional_mask, create_masks_for_generate

from fxpipe.errors import TraceError
from fxpipe.graph.markers import SplitPoint
from fxpipe.graph.pipe import pipeline

ATTENTION = nn.functional.scaled_dot_product_attention
TINY = {"vocab_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}


class KernelCalls(TorchFunctionMode):
    """Writes down every call of the attention kernel: the mask's size and the flags."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is ATTENTION:
            mask = kwargs.get("attn_mask")
            shape = None if mask is None else tuple(mask.shape)
            self.calls.append((shape, kwargs.get("is_causal"), kwargs.get("dropout_p")))
        return func(*args, **kwargs)


def llama(**options):
    config = transformers.LlamaConfig(
        **TINY, intermediate_size=16, num_key_value_heads=1, use_cache=False, **options
    )
    return transformers.LlamaForCausalLM(config), "model.layers.1"


def gpt2(**options):
    config = transformers.GPT2Config(
        vocab_size=32, n_embd=16, n_head=2, n_layer=2, use_cache=False, **options
    )
    return transformers.GPT2LMHeadModel(config), "transformer.h.1"


def bert(**options):
    config = transformers.BertConfig(**TINY, intermediate_size=16, **options)
    return transformers.BertForMaskedLM(config), "bert.encoder.layer.1"


def mistral(**options):
    config = transformers.MistralConfig(
        **TINY, intermediate_size=16, num_key_value_heads=1, use_cache=False,
        sliding_window=6, **options,
    )  # fmt: skip
    return transformers.MistralForCausalLM(config), "model.layers.1"


def inputs(rows, length, mask):
    torch.manual_seed(rows)
    found = {"input_ids": torch.randint(0, 32, (rows, length))}
    if mask != "none":
        found["attention_mask"] = torch.ones(rows, length, dtype=torch.long)
    if mask == "padded":
        found["attention_mask"][:, :2] = 0
    return found


def same_calls(model, pipe, kwargs):
    with KernelCalls() as plain:
        expected = model(**kwargs).logits
    with KernelCalls() as ours:
        found = pipe(**kwargs).logits
    assert ours.calls == plain.calls
    # Rows of padding alone are not a number in both.
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("make", [llama, gpt2, bert, mistral])
@pytest.mark.parametrize("mask", ["none", "full", "padded"])
def test_stages_call_the_same_kernels(make, mask):
    model, layer = make()
    spec = {layer: SplitPoint.BEGINNING}
    pipe = pipeline(model.eval(), (), inputs(1, 8, mask), split_spec=spec)

    # One row is the example's own size; other rows, lengths and padding may follow.
    for rows, length in ((1, 8), (2, 8), (3, 5)):
        same_calls(model, pipe, inputs(rows, length, mask))
    if mask != "none":
        same_calls(model, pipe, inputs(2, 8, "full"))
        same_calls(model, pipe, inputs(2, 8, "padded"))


def test_eager_attention_makes_its_own_mask():
    model, layer = llama(attn_implementation="eager")
    spec = {layer: SplitPoint.BEGINNING}
    pipe = pipeline(model.eval(), (), inputs(2, 8, "padded"), split_spec=spec)

    for kwargs in (inputs(2, 8, "padded"), inputs(1, 8, "padded"), inputs(2, 8, "full")):
        torch.testing.assert_close(pipe(**kwargs).logits, model(**kwargs).logits)


def test_code_that_was_opened_gets_the_mask_it_has_seen():
    # An opened attention layer decides by `attention_mask is None` while it is traced. Its
    # numbers are right, but its kernel is another: who wants that must say so.
    model, layer = llama()
    spec = {f"{layer}.self_attn.o_proj": SplitPoint.BEGINNING}
    with pytest.raises(TraceError, match="calls of attention kernels"):
        pipeline(model.eval(), (), inputs(2, 8, "full"), split_spec=spec)

    pipe = pipeline(model.eval(), (), inputs(2, 8, "full"), split_spec=spec, check=False)

    for kwargs in (inputs(2, 8, "full"), inputs(2, 8, "padded")):
        torch.testing.assert_close(pipe(**kwargs).logits, model(**kwargs).logits)


class Padding(nn.Module):
    """Finds padding by what the model itself computes: no stage can do that again."""

    def __init__(self):
        super().__init__()
        self.register_buffer("least", torch.tensor(-1e9))

    def forward(self, x):
        return (x.mean(-1) > self.least).long()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x, mask):
        heads = self.linear(x)[:, None]
        return x + ATTENTION(heads, heads, heads, attn_mask=mask)[:, 0]


class OwnPadding(nn.Module):
    """As DETR: the mask says where the features of an image are."""

    def __init__(self):
        super().__init__()
        self.config = transformers.BertConfig(**TINY, attn_implementation="sdpa")
        self.padding = Padding()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        given = self.padding(x)
        mask = create_bidirectional_mask(self.config, inputs_embeds=x, attention_mask=given)
        for layer in self.layers:
            x = layer(x, mask)
        return x


def test_each_stage_makes_a_mask_of_what_another_has_computed():
    # It was sent, as a whole mask, and attention lost the kernel that needs none.
    model = OwnPadding()
    spec = {"layers.2": SplitPoint.BEGINNING}
    pipe = pipeline(model, (torch.randn(2, 5, 16),), split_spec=spec)
    padded = torch.randn(3, 5, 16)
    padded[1:, 3:] = -1e12

    for x, mask in ((torch.randn(3, 5, 16), None), (padded, (3, 1, 5, 5))):
        with KernelCalls() as plain:
            expected = model(x)
        with KernelCalls() as ours:
            found = pipe(x)
        assert ours.calls == plain.calls
        assert ours.calls[-1][0] == mask
        torch.testing.assert_close(found, expected)


class CausalLayer(Layer):
    def forward(self, x, mask):
        heads = self.linear(x)[:, None]
        return x + ATTENTION(heads, heads, heads, attn_mask=mask, is_causal=mask is None)[:, 0]


class NamedMasks(OwnPadding):
    """As Gemma 4: all masks are made at once, and each layer takes the one of its kind."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(CausalLayer() for _ in range(3))
        kinds = ["sliding_attention", "full_attention"]
        self.config = transformers.Gemma2Config(
            **TINY, layer_types=kinds, sliding_window=8, attn_implementation="sdpa"
        )

    def forward(self, x):
        given = self.padding(x)
        masks = create_masks_for_generate(self.config, x, given, None)
        for number, layer in enumerate(self.layers):
            x = layer(x, masks[self.config.layer_types[number % 2]])
        return x


def test_a_stage_makes_masks_again_that_are_made_together():
    # They were sent, since what crossed was a part of the call and not the call.
    model = NamedMasks()
    pipe = pipeline(model, (torch.randn(2, 5, 16),), split_spec={"layers.1": SplitPoint.BEGINNING})
    padded = torch.randn(3, 5, 16)
    padded[1:, 3:] = -1e12

    for x, mask in ((torch.randn(3, 5, 16), None), (padded, (3, 1, 5, 5))):
        with KernelCalls() as plain:
            expected = model(x)
        with KernelCalls() as ours:
            found = pipe(x)
        assert ours.calls == plain.calls
        assert ours.calls[-1][0] == mask
        torch.testing.assert_close(found, expected)


class FewQueries(OwnPadding):
    """As InstructBLIP's Q-Former: the mask is for a part of the rows, which no stage is sent."""

    def forward(self, x):
        given = self.padding(x)
        mask = create_bidirectional_mask(
            self.config, inputs_embeds=x[:, :3], attention_mask=given, encoder_hidden_states=x
        )
        for layer in self.layers:
            x = layer(x, mask)
        return x


class CrossLayer(Layer):
    def forward(self, x, mask):
        heads, states = self.linear(x[:, :3])[:, None], x[:, None]
        found = ATTENTION(heads, states, states, attn_mask=mask)[:, 0]
        return torch.cat([x[:, :3] + found, x[:, 3:]], 1)


def test_a_mask_of_a_size_that_nothing_in_the_stage_has_is_made_again():
    model = FewQueries()
    model.layers = nn.ModuleList(CrossLayer() for _ in range(3))

    pipe = pipeline(model, (torch.randn(2, 5, 16),), split_spec={"layers.2": SplitPoint.BEGINNING})

    for x in (torch.randn(2, 5, 16), torch.randn(3, 7, 16)):
        with KernelCalls() as plain:
            expected = model(x)
        with KernelCalls() as ours:
            found = pipe(x)
        assert ours.calls == plain.calls
        assert ours.calls[-1][0] is None
        torch.testing.assert_close(found, expected)


def test_transformers_is_left_as_it_was():
    from transformers.models.llama import modeling_llama

    before = modeling_llama.create_causal_mask
    model, layer = llama()
    pipeline(model, (), inputs(2, 8, "none"), split_spec={layer: SplitPoint.BEGINNING})

    assert modeling_llama.create_causal_mask is before


class BlockMasks:
    """Writes down the block mask of each call of flex attention, as true and false."""

    def __init__(self):
        self.calls = []

    def __enter__(self):
        self._known = flex_attention.compile_friendly_flex_attention
        flex_attention.compile_friendly_flex_attention = self._call
        return self

    def __exit__(self, *error):
        flex_attention.compile_friendly_flex_attention = self._known

    def _call(self, query, key, value, **options):
        mask = options["block_mask"]
        marks = torch.arange(query.shape[-2])
        rows = torch.arange(query.shape[0])[:, None, None]
        allowed = mask.mask_mod(rows, torch.tensor(0), marks[None, :, None], marks[None, None, :])
        self.calls.append((mask.shape, allowed.tolist()))
        return self._known(query, key, value, **options)


# Compiling a block mask makes torch warn of its own code, and of flex attention in Python.
@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:flex_attention called without")
def test_flex_attention_gets_the_same_block_masks():
    model, layer = llama(attn_implementation="flex_attention", head_dim=16)
    model = model.eval().requires_grad_(False)  # on a CPU flex attention has no backward
    torch.compiler.set_stance("force_eager")
    try:
        spec = {layer: SplitPoint.BEGINNING}
        # The comparison is made below, with the block masks, which the check does not see.
        pipe = pipeline(model, (), inputs(2, 8, "padded"), split_spec=spec, check=False)
        for kwargs in (inputs(1, 8, "padded"), inputs(2, 5, "full"), inputs(5, 8, "padded")):
            with torch.no_grad(), BlockMasks() as plain:
                expected = model(**kwargs).logits
            with torch.no_grad(), BlockMasks() as ours:
                found = pipe(**kwargs).logits

            assert ours.calls == plain.calls
            torch.testing.assert_close(found, expected, equal_nan=True)
    finally:
        torch.compiler.set_stance("default")


def test_a_block_mask_that_opened_code_uses_is_refused():
    model, layer = llama(attn_implementation="flex_attention", head_dim=16)
    spec = {f"{layer}.self_attn.o_proj": SplitPoint.BEGINNING}

    with pytest.raises(TraceError, match="code that is split calls flex attention"):
        pipeline(model.eval(), (), inputs(2, 8, "full"), split_spec=spec)
