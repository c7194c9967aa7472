"""Kernels run on the GPU if there is one, else in Triton's interpreter: it must be chosen before they are imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
