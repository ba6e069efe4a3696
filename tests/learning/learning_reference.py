"""What runs are compared with: plain SGD written out, and a small run."""

import ddlsim
from ddlsim.data import BatchStream, iid, load_digits, split
from ddlsim.nn.network import build_network

STAR = "office-1gbe"


def learn(strategy, workers=4, batch_size=16, training=None, **more):
    training = training or ddlsim.Training("digits", rate=0.1, updates=30, sharding="shared", evaluate_every=10)
    return ddlsim.simulate(STAR, "digits-cnn", strategy, batch_size, workers, training=training, **more)


def plain_sgd(batch_size, n_updates, optimizer=None, rate=0.1, seed=0):
    """One worker, written out."""
    optimizer = optimizer or ddlsim.SGD()
    network = build_network("digits-cnn", seed)
    train, _ = split(load_digits(), 0.2, seed)
    batches = BatchStream(iid(train.labels, 1, seed)[0], seed, 0)
    params, state = network.initial_params, optimizer.init(network.initial_params)
    for step in range(n_updates):
        chosen = batches.batch(step, batch_size)
        _, gradient = network.loss_and_gradient(params, train.x[chosen], train.labels[chosen])
        params, state = optimizer.update(params, gradient, state, rate)
    return params
