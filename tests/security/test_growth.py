"""Memory of every process stays what it is, however many requests of varied length have passed.

50,000 requests take too long for a test: `python -m tests.security.growth --requests 50000 --from 10000`.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from pd_cluster.engine.process import KEPT_PROGRAMS, bound_programs
from tests.deadlines import COMMAND_S
from tests.security.growth import Load, measure

NUM_REQUESTS = 6000
FIRST = 2000  # from here on
TOLERANCE = 0.02
PROGRAMS_MB = 350  # of the loop below: 1,200 MB without bounds, 230 with them

MANY_SHAPES = """
import os, resource, random
from pd_cluster.engine.process import bound_programs
bound_programs(os.environ)
import torch
torch.set_num_threads(1)
shapes = [(256, 512), (512, 256), (256, 256), (256, 768)]
weights = [torch.ops.mkldnn._reorder_linear_weight(torch.randn(o, i)) for i, o in shapes]
def step(num_tokens):
    for (width, _), weight in zip(shapes, weights):
        torch.ops.mkldnn._linear_pointwise(torch.randn(num_tokens, width), weight, None, "none", [], "")
step(700)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for num_tokens in random.Random(0).sample(range(1, 600), 500):
    step(num_tokens)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_what_the_operator_has_set_stays() -> None:
    environment = {"LRU_CACHE_CAPACITY": "7"}
    bound_programs(environment)
    assert environment == KEPT_PROGRAMS | {"LRU_CACHE_CAPACITY": "7"}


@pytest.mark.slow
def test_steps_of_all_lengths_leave_few_programs_behind() -> None:
    """torch and oneDNN keep a program for each number of tokens that a step ever had, up to 1,024 of them."""
    found = subprocess.run(
        [sys.executable, "-c", MANY_SHAPES], capture_output=True, text=True, check=True, timeout=COMMAND_S
    )
    assert int(found.stdout) <= PROGRAMS_MB


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(3600)
def test_no_process_of_a_cluster_grows() -> None:
    growth = measure(Load(NUM_REQUESTS, longest=120, sample_every=100)).growth(FIRST)
    assert max(growth.values()) <= TOLERANCE, growth
