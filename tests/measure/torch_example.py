"""PyTorch modules for the tests: imported only where PyTorch is installed."""

import torch


def linear():
    return torch.nn.Linear(4, 3)


def embedding(batch_size):
    return torch.nn.Embedding(10, 4), torch.arange(batch_size) % 10


def pair():
    return torch.nn.LSTM(4, 3)  # its output is a tuple


NUMBER = 3
