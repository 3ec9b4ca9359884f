"""Run by test_process: a call that takes long, to be interrupted.

Usage: python interrupted.py {caught,uncaught}
"""

import sys
import time

import jax
import numpy as np

from helpers import federated
from helpers.federated import tff

federated.set_local_python_execution_context()


@tff.jax.computation(tff.TensorType(np.float32, (400, 400)), np.int32)
def power(matrix, count):
    return jax.lax.fori_loop(0, count, lambda _, x: x @ matrix / 400, matrix)


ones = np.ones((400, 400), np.float32)
power(ones, 1)
started = time.monotonic()
power(ones, 50)
# Long enough to be interrupted on any machine; the script's end has to wait for it.
count = int(50 * 8 / (time.monotonic() - started)) + 1
print("ready", flush=True)
if sys.argv[1] == "uncaught":
    power(ones, 1000 * count)
started = time.monotonic()
try:
    power(ones, count)
except KeyboardInterrupt:
    print(f"interrupted after {time.monotonic() - started:.1f}", flush=True)
print("usable:", power(ones, 1)[0, 0], flush=True)
sys.exit(3)
