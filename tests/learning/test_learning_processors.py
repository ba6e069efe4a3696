"""What is learned does not depend on the processor: no sum is left to kernels that are chosen for the processor."""

import os
import subprocess
import sys

import pytest
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

PROGRAM = """
import hashlib

import numpy as np

import ddlsim
from ddlsim.data.dataset import resize

for model, data, compression in (
    ("digits-cnn", "digits", None),
    ("digits-cnn", "digits", ddlsim.Compression(ddlsim.ErrorFeedback(ddlsim.PowerSGD(2)))),
    ("clicks-dlrm", "clicks", None),
):
    training = ddlsim.Training(data, rate=0.1, epochs=1)
    result = ddlsim.simulate(
        "office-1gbe", model, ddlsim.AllReduce(), 64, workers=4, training=training, compression=compression
    )
    print(hashlib.sha256(result.params.tobytes()).hexdigest())
images = np.random.default_rng(0).random((5, 3, 40, 40), np.float32)
print(hashlib.sha256(resize(images, 28, 30).tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_what_is_learned_does_not_depend_on_the_processor():
    """As on an old processor: OpenBLAS without AVX, NumPy without the kernels that it selects at run time."""
    disabled = " ".join(name for name in __cpu_dispatch__ if __cpu_features__.get(name))
    old = os.environ | {"OPENBLAS_CORETYPE": "Prescott", "NPY_DISABLE_CPU_FEATURES": disabled}
    outputs = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=environment
        ).stdout
        for environment in (None, old)
    ]
    assert outputs[0] == outputs[1]
