"""Makes `logits.npz`: what the transformers library computes in float32 for the random models of the tests.

Needs torch and transformers, which the project does not require:

    python tests/data/architectures/make_reference.py
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[2])]
from emulator_engine.models import MODELS, REFERENCE_IDS, REFERENCE_SCALE  # noqa: E402
from emulator_formats.folders import random_model  # noqa: E402

logits = {}
with tempfile.TemporaryDirectory() as temporary:
    for name, config in MODELS.items():
        folder = random_model(Path(temporary) / name, scale=REFERENCE_SCALE, **config)
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kind = getattr(transformers, settings["architectures"][0])
        settings["model_type"] = kind.config_class.model_type
        settings.setdefault("tie_word_embeddings", False)
        (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
        model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            logits[name] = model(torch.tensor([REFERENCE_IDS])).logits[0].numpy()
        print(name, logits[name].shape, float(np.abs(logits[name]).max()))
np.savez_compressed(HERE / "logits.npz", **logits)
