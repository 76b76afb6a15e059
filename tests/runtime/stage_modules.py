"""Small modules, one difficulty each, for the tests of the split backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

__all__ = ["DIM", "MODULES", "Checkpointed", "Lambda", "inputs_for"]

DIM = 6


class Lambda(nn.Module):
    """A module from parameters and a function of (module, input)."""

    def __init__(self, function: Callable[..., Tensor], **children: Any) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.use_reentrant and not x.requires_grad:
            return self.inner(x)  # reentrant checkpoints give no gradient for such an input
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class Scale(torch.autograd.Function):
    """A user's Function with a weight, which no mode can look into."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.flatten(0, -2).t() @ grad.flatten(0, -2)


class Recompute(torch.autograd.Function):
    """A user's own checkpoint: gradients of the parameters come from autograd.grad."""

    @staticmethod
    def forward(ctx: Any, run: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.run, ctx.parameters = run, parameters
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        wanted = [p for p in ctx.parameters if p.requires_grad]
        grads = iter(torch.autograd.grad(y, (x, *wanted), grad))
        return (
            None,
            next(grads),
            *(next(grads) if p.requires_grad else None for p in ctx.parameters),
        )


class Tagged(Tensor):
    """A tensor subclass that does nothing but exist."""

    def new_empty(self, *args: Any, **kwargs: Any) -> Tensor:  # for deepcopy
        return super().new_empty(*args, **kwargs).as_subclass(Tagged)


def tagged_weight() -> nn.Module:
    tagged = nn.Parameter(torch.randn(4, DIM).as_subclass(Tagged))
    return Lambda(lambda m, x: F.linear(x, m.w).as_subclass(Tensor), w=tagged)


def save_products(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def selectively(m: Any, x: Tensor) -> Tensor:
    def contexts() -> Any:
        return create_selective_checkpoint_contexts(save_products)

    return checkpoint(m.inner, x, use_reentrant=False, context_fn=contexts)


def doubled(m: Any, x: Tensor) -> Tensor:
    return torch.func.functional_call(m.a, {"weight": m.a.weight * 2}, (x,))


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / 2)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, 8), nn.Tanh(), nn.Linear(8, DIM))


def both_ways() -> nn.Module:
    """A weight with a deferrable use and another one."""
    return Lambda(lambda m, x: F.linear(x, m.w) + m.w.square().sum(), w=weight(DIM, DIM))


def tied() -> nn.Module:
    module = Lambda(
        lambda m, x: m.head(m.table(x).tanh()),
        table=nn.Embedding(DIM, DIM),
        head=nn.Linear(DIM, DIM, bias=False),
    )
    module.head.weight = module.table.weight
    return module


def force(m: Any, x: Tensor) -> Tensor:
    """A gradient with respect to the input as a part of the output, as in a force field."""
    x = x if x.requires_grad else x.detach().requires_grad_()
    energy = m.net(x).square().sum()
    (gradient,) = torch.autograd.grad(energy, x, create_graph=True)
    return gradient + x


def inner_step(m: Any, x: Tensor) -> Tensor:
    """A gradient step on the weight inside the forward, as in meta-learning."""
    loss = F.linear(x, m.w).square().mean()
    (gradient,) = torch.autograd.grad(loss, m.w, create_graph=True)
    return F.linear(x, m.w - 0.1 * gradient)


def per_row(m: Any, x: Tensor) -> Tensor:
    rows = x.flatten(0, -2)
    return torch.func.vmap(lambda row: F.linear(row[None], m.w)[0])(rows).view(x.shape)


def tangent(m: Any, x: Tensor) -> Tensor:
    return torch.func.jvp(lambda v: F.linear(v, m.w).tanh(), (x,), (x.cos(),))[1]


def written_in_place(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    y[..., :2] *= 2
    y.relu_()
    return m.b(y.view(-1, DIM)).view(x.shape).add_(1)


def without_grad(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = m.a(x).abs().mean()
    return m.a(x) * scale


# name -> (module, input shape); a shape without floats means token numbers
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (4, DIM)),
    "mlp_of_batches": (mlp, (2, 3, DIM)),
    "linear_without_bias": (lambda: nn.Linear(DIM, DIM, bias=False), (2, 3, DIM)),
    "linear_used_twice": (lambda: Lambda(lambda m, x: m.a(m.a(x).tanh()), a=mlp()), (4, DIM)),
    "inplace_relu": (
        lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(DIM, DIM), nn.ReLU(inplace=True)),
        (2, 3, DIM),
    ),
    "written_in_place": (
        lambda: Lambda(written_in_place, a=nn.Linear(DIM, DIM), b=nn.Linear(DIM, DIM)),
        (2, 3, DIM),
    ),
    "matmul_right": (lambda: Lambda(lambda m, x: x @ m.w, w=weight(DIM, DIM)), (2, 3, DIM)),
    "matmul_left": (lambda: Lambda(lambda m, x: (m.w @ x).add_(1), w=weight(3, 3)), (2, 3, DIM)),
    "matmul_transposed": (lambda: Lambda(lambda m, x: x @ m.w.T, w=weight(4, DIM)), (2, 3, DIM)),
    "matmul_stack": (lambda: Lambda(lambda m, x: x @ m.w, w=weight(2, DIM, 4)), (3, DIM)),
    "mm": (lambda: Lambda(lambda m, x: torch.mm(x, m.w), w=weight(DIM, 4)), (3, DIM)),
    "bmm": (lambda: Lambda(lambda m, x: torch.bmm(x, m.w), w=weight(2, DIM, 4)), (2, 3, DIM)),
    "addmm": (
        lambda: Lambda(lambda m, x: torch.addmm(m.b, x, m.w), w=weight(DIM, 4), b=weight(4)),
        (3, DIM),
    ),
    "baddbmm": (
        lambda: Lambda(
            lambda m, x: torch.baddbmm(m.b, x, m.w), w=weight(2, DIM, 4), b=weight(2, 1, 4)
        ),
        (2, 3, DIM),
    ),
    "einsum": (
        lambda: Lambda(lambda m, x: torch.einsum("ecd,edf->ecf", x, m.w), w=weight(2, DIM, 4)),
        (2, 3, DIM),
    ),
    "einsum_permuted": (
        lambda: Lambda(lambda m, x: torch.einsum("hd,bcd->chb", m.w, x).mul_(2), w=weight(4, DIM)),
        (2, 3, DIM),
    ),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding="same", dilation=2), (2, 4, 7)),
    "conv1d_one_sided": (lambda: nn.Conv1d(4, 6, 2, padding="same"), (2, 4, 7)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), (2, 4, 5, 5)),
    "conv2d_reflect": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (2, 4, 5, 5)),
    "conv2d_unbatched": (lambda: nn.Conv2d(4, 6, 3), (4, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, bias=False), (2, 2, 3, 3, 3)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(4, 3, 3, stride=2), (2, 4, 5)),
    "conv_transpose2d": (
        lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1, groups=2, dilation=2),
        (2, 4, 5, 5),
    ),
    "conv_batchnorm": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        (2, 4, 5, 5),
    ),
    "embedding": (lambda: nn.Embedding(DIM, 4), ()),
    "embedding_padded": (lambda: nn.Embedding(DIM, 4, padding_idx=-1), ()),
    "embedding_padded_from_the_end": (
        lambda: Lambda(lambda m, x: F.embedding(x, m.w, padding_idx=-1), w=weight(DIM, 4)),
        (),
    ),
    "embedding_by_frequency": (lambda: nn.Embedding(DIM, 4, scale_grad_by_freq=True), ()),
    "embedding_renormed": (lambda: nn.Embedding(DIM, 4, max_norm=0.5), ()),
    "tied": (tied, ()),
    "attention": (
        lambda: Lambda(
            lambda m, x: m.a(x, x, x, need_weights=False)[0],
            a=nn.MultiheadAttention(DIM, 2, batch_first=True),
        ),
        (2, 3, DIM),
    ),
    "transformer_layer": (
        lambda: nn.TransformerEncoderLayer(DIM, 2, 8, dropout=0.0, batch_first=True),
        (2, 3, DIM),
    ),
    "lstm": (lambda: Lambda(lambda m, x: m.a(x)[0], a=nn.LSTM(DIM, 4)), (2, 3, DIM)),
    "gru": (lambda: Lambda(lambda m, x: m.a(x)[0], a=nn.GRU(DIM, 4)), (2, 3, DIM)),
    "layernorm": (lambda: nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM)), (2, 3, DIM)),
    "custom_function": (
        lambda: Lambda(lambda m, x: Scale.apply(x, m.w), w=weight(DIM, 4)),
        (3, DIM),
    ),
    "custom_checkpoint": (
        lambda: Lambda(lambda m, x: Recompute.apply(m.a, x, *m.a.parameters()), a=mlp()),
        (3, DIM),
    ),
    "checkpoint": (lambda: Checkpointed(mlp(), use_reentrant=False), (3, DIM)),
    "checkpoint_reentrant": (lambda: Checkpointed(mlp(), use_reentrant=True), (3, DIM)),
    "checkpoint_nested": (
        lambda: Checkpointed(Checkpointed(mlp(), use_reentrant=False), use_reentrant=True),
        (3, DIM),
    ),
    "checkpoint_selective": (lambda: Lambda(selectively, inner=mlp()), (3, DIM)),
    "tensor_subclass": (tagged_weight, (3, DIM)),
    "functional_call": (lambda: Lambda(doubled, a=nn.Linear(DIM, 4)), (3, DIM)),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(DIM, 4)), (3, DIM)),
    "weight_used_both_ways": (both_ways, (3, DIM)),
    "checkpoint_both_ways": (lambda: Checkpointed(both_ways(), use_reentrant=True), (3, DIM)),
    "no_grad_inside": (lambda: Lambda(without_grad, a=nn.Linear(DIM, DIM)), (3, DIM)),
    "force_field": (lambda: Lambda(force, net=mlp()), (3, DIM)),
    "inner_step": (lambda: Lambda(inner_step, w=weight(DIM, DIM)), (3, DIM)),
    "vmap_inside": (lambda: Lambda(per_row, w=weight(DIM, DIM)), (2, 3, DIM)),
    "jvp_inside": (lambda: Lambda(tangent, w=weight(DIM, DIM)), (3, DIM)),
    "complex": (
        lambda: Lambda(
            lambda m, x: (x.to(torch.complex128) @ m.w).abs(),
            w=nn.Parameter(torch.randn(DIM, 4, dtype=torch.complex128)),
        ),
        (3, DIM),
    ),
    "vector": (lambda: nn.Linear(DIM, 4), (DIM,)),
}


def inputs_for(name: str) -> Tensor:
    shape = MODULES[name][1]
    return torch.randn(shape) if shape else torch.tensor([[0, 1, 1], [5, 4, 1]])
