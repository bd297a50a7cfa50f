"""A small training loop that reports its steps to Paceline."""

import torch

from paceline import steplog  # or copy paceline/steplog.py next to your program

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512))
optimizer = torch.optim.AdamW(model.parameters())
loader = (torch.randn(256, 512) for _ in range(40))

for batch in steplog.batches(loader):
    with steplog.step(samples=len(batch)) as step:
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step.loss = loss.item()  # also waits for the GPU, so that the step time is complete
