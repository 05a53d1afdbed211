"""Optimizers whose moments take one byte an element: AdamW, Adam, SGD with momentum, Lion, Adagrad."""

from loadmaster.runtime.optim.algorithms import SGD, Adagrad, Adam, AdamW, Lion
from loadmaster.runtime.optim.files import Piece, load_pieces, load_state, pieces, save_state
from loadmaster.runtime.optim.kernel import name as kernel_name
from loadmaster.runtime.optim.optimizer import Blockwise
from loadmaster.runtime.optim.shard import ParameterShard, embedding_parameters

__all__ = [
    "SGD", "Adagrad", "Adam", "AdamW", "Blockwise", "Lion", "ParameterShard", "Piece", "embedding_parameters",
    "kernel_name", "load_pieces", "load_state", "pieces", "save_state",
]  # fmt: skip
