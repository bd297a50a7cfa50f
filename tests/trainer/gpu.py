"""What tests share that need a GPU (`make test-gpu`)."""

from __future__ import annotations

import pytest
import torch

GPUS = torch.cuda.device_count()
DEVICE = torch.device("cuda", 0)
CAPABILITY = torch.cuda.get_device_capability(0) if GPUS else (0, 0)
ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="no GPU that this PyTorch can use"),
    # Warnings of a machine's libraries are not the trainer's.
    pytest.mark.filterwarnings("default"),
]
