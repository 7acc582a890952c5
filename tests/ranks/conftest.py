"""One thread: a fork after parallel work in the parent would hang its ranks."""

import torch

torch.set_num_threads(1)
