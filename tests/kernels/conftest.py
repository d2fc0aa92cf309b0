"""Without a GPU the Triton kernels run in Triton's interpreter, which must be asked for before they are defined."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from tests.kernels.interpreter import hasten

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton"):
        hasten()
