"""Decentralised training written out in NumPy: gradients of N workers' shards, without clock and network."""

import numpy as np
from learning_reference import learn

import ddlsim
from ddlsim.workload.model import load_model

BATCH = 16
RATE = 0.1


def training(updates, **more):
    return ddlsim.Training(**({"data": "digits", "rate": RATE, "updates": updates, "evaluate_every": 10} | more))


class Workers:
    """N models `x`, shape (N, n_params), that all make their steps together."""

    def __init__(self, n, optimizer=None):
        self.task = training(1).task(load_model("digits-cnn"), n, seed=0)
        self.n = n
        self.optimizer = optimizer or ddlsim.SGD()
        self.x = [self.task.network.initial_params] * n
        self.states = [self.optimizer.init(x) for x in self.x]
        self.step = 0

    def gradients(self):
        """Everybody's gradient of its next batch at its own model."""
        task, first = self.task, self.step * BATCH
        chosen = [shard.indices(first, BATCH) for shard in task.shards]
        self.step += 1
        return [
            task.network.loss_and_gradient(x, task.train.x[part], task.train.labels[part])[1]
            for x, part in zip(self.x, chosen, strict=True)
        ]

    def local_steps(self):
        """x_i <- x_i - eta g_i(x_i)"""
        gradients = self.gradients()
        for i, gradient in enumerate(gradients):
            self.x[i], self.states[i] = self.optimizer.update(self.x[i], gradient, self.states[i], RATE)

    def mean(self):
        return np.mean(self.x, axis=0, dtype=np.float64).astype(np.float32)

    def follow(self, xs):
        self.x = [np.asarray(x, np.float32) for x in xs]


def simulated(strategy, n, updates, **more):
    """The mean model of a run without jitter, in which all workers have made `updates` steps."""
    return learn(strategy, n, BATCH, training=training(updates, **more)).params


class ThenNothing:
    """A schedule: learn at RATE until `epoch`, then with rate 0."""

    def __init__(self, epoch):
        self.epoch = epoch

    def rate(self, epoch):
        return RATE if epoch < self.epoch else 0.0
