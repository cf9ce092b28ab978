"""Registers the reducers, as PyTorch's package does."""

from multiprocessing.reduction import ForkingPickler

from .. import Parameter, Tensor
from . import reductions

for kind in (Tensor, Parameter):
    ForkingPickler.register(kind, reductions.reduce_tensor)
