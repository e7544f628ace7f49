"""Muon: momentum whose update of a matrix has all singular values near one.

A policy gradient of a few hundred answers is mostly noise, of very different size in different matrices.
Such an update moves every matrix by the same amount, whatever the size of its gradient.
Method and the polynomial: Keller Jordan, https://kellerjordan.github.io/posts/muon/ ; the scale, which makes
an element of the update 0.2 in the mean square: https://arxiv.org/abs/2502.16982 .
"""
import torch


def orthogonal(g):
    """[..., m, n]: the nearest matrix with orthogonal rows or columns, roughly, by a Newton-Schulz iteration."""
    wide = g.shape[-2] <= g.shape[-1]
    x = g if wide else g.transpose(-1, -2)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-12)
    for _ in range(5):
        a = x @ x.transpose(-1, -2)
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x if wide else x.transpose(-1, -2)


class Muon:
    """step() moves `params`, tensors of two or more dimensions, by the gradients given in their order."""

    def __init__(self, params, lr, momentum):
        self.params, self.lr, self.momentum = params, lr, momentum
        self.mean = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self, grads, scale=1.0):
        for p, g, m in zip(self.params, grads, self.mean):
            m.mul_(self.momentum).add_(g)
            update = orthogonal(g + self.momentum * m)
            p.sub_(update, alpha=0.2 * max(p.shape[-2:]) ** 0.5 * self.lr * scale)
