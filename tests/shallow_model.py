"""The demo model with two of its six layers, for tests of what goes on around a model: a step takes half the time.

With these two its greedy answers vary as those of the whole model do. With most other pairs they repeat one token.
Those of ONE_LAYER vary, too, but its KV of a token does not depend on the tokens before: blocks of equal tokens after
other ones are equal. It is for tests in which no such blocks could be taken for each other.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

from safetensors.torch import load_file, save_file

import pd_cluster

DEMO_MODEL = Path(pd_cluster.__file__).parent / "demo_model"
TWO_LAYERS = (3, 5)
ONE_LAYER = (5,)
NUM_LAYERS = len(TWO_LAYERS)


@cache
def shallow_model(layers: tuple[int, ...] = TWO_LAYERS) -> str:
    """The directory of the model with these layers, which goes when the process ends."""
    directory = Path(tempfile.mkdtemp(prefix="shallow-model-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    for path in DEMO_MODEL.iterdir():
        if path.suffix != ".safetensors":
            shutil.copyfile(path, directory / path.name)
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    config |= {"num_hidden_layers": len(layers), "layer_types": config["layer_types"][: len(layers)]}
    (directory / "config.json").write_text(json.dumps(config))
    kept = {}
    for name, weight in load_file(DEMO_MODEL / "model.safetensors").items():
        start, part, rest = name.partition(".layers.")
        number, _, parameter = rest.partition(".")
        if not part:
            kept[name] = weight
        elif int(number) in layers:
            kept[f"{start}{part}{layers.index(int(number))}.{parameter}"] = weight
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    return str(directory)


def as_demo_model() -> tuple[str, str]:
    """Flags of a node that serves it under the whole model's name."""
    return f"--model={shallow_model()}", "--served-model-name=demo_model"
