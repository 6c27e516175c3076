"""Seeds, printing, random tensors, environment variables."""

from __future__ import annotations

import random
import sys

import torch


def init_seed(seed: int = 0) -> None:
    """Seeds Python's, torch's (all devices) and, where it is loaded, numpy's random number generator."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
