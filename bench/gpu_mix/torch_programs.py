"""Training with PyTorch and torchvision: three image classifiers and a diffusion model, on synthetic images."""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional

from bench.gpu_mix import torch_determinism
from bench.gpu_mix.torch_determinism import as_bytes, begin

CLASSES = 200
sees_gpu, peak_mb = torch_determinism.sees_gpu, torch_determinism.peak_mb


def convnext(size: Mapping[str, int]) -> Iterator[bytes]:
    device = begin(size["seed"])
    model = torchvision.models.convnext_tiny(num_classes=CLASSES).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    images = torch.rand(size["images"], 3, size["pixels"], size["pixels"], device=device)
    labels = torch.randint(CLASSES, (size["images"],), device=device)
    for step in range(size["steps"]):
        chosen = torch.randint(size["images"], (size["batch"],), device=device)
        batch = images[chosen].contiguous(memory_format=torch.channels_last)
        _learn(model, optimizer, (batch, labels[chosen]), step)
    return as_bytes(model.state_dict().values())


def efficientnet(size: Mapping[str, int]) -> Iterator[bytes]:
    device = begin(size["seed"])
    model = torchvision.models.efficientnet_b0(num_classes=CLASSES).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    pictures = _Pictures(size["seed"], size["pixels"], device)
    for step in range(size["steps"]):
        _learn(model, optimizer, pictures.batch(size["batch"]), step)
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=device)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        for _ in range(size["eval_steps"]):
            images, labels = pictures.batch(size["eval_batch"])
            right += (model(images).argmax(1) == labels).sum()
    print(f"right: {right.item()}", flush=True)
    return as_bytes([*model.state_dict().values(), right])


def vit(size: Mapping[str, int]) -> Iterator[bytes]:
    device = begin(size["seed"])
    model = torchvision.models.VisionTransformer(
        image_size=size["pixels"],
        patch_size=16,
        num_layers=size["layers"],
        num_heads=12,
        hidden_dim=size["width"],
        mlp_dim=size["width"] * 4,
        num_classes=CLASSES,
        dropout=0.1,
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    pictures = _Pictures(size["seed"], size["pixels"], device)
    for step in range(size["steps"]):
        _learn(model, optimizer, pictures.batch(size["batch"]), step, mixed=False)
    return as_bytes(model.state_dict().values())


class _Pictures:
    """Images that the CPU crops, flips and changes in brightness for each batch."""

    def __init__(self, seed: int, pixels: int, device: torch.device) -> None:
        self._device = device
        self._random = np.random.default_rng(seed)
        self._pixels = pixels
        self._stored = self._random.integers(0, 256, (256, pixels + 32, pixels + 32, 3), dtype=np.uint8)

    def batch(self, count: int) -> tuple[Tensor, Tensor]:
        """Return `count` images and their labels on the device."""
        batch = np.empty((count, self._pixels, self._pixels, 3), dtype=np.uint8)
        for place in range(count):
            top, left = self._random.integers(0, 33, 2)
            image = self._stored[self._random.integers(len(self._stored))]
            crop = image[top : top + self._pixels, left : left + self._pixels]
            gain, shift = self._random.uniform(0.8, 1.2), self._random.uniform(-16, 16)
            changed = np.clip(crop.astype(np.float32) * np.float32(gain) + np.float32(shift), 0, 255)
            batch[place] = changed[:, ::-1] if self._random.random() < 0.5 else changed
        labels = torch.from_numpy(self._random.integers(0, CLASSES, count))
        images = torch.from_numpy(batch).to(self._device).permute(0, 3, 1, 2).float() / 127.5 - 1.0
        return images, labels.to(self._device)


def _learn(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], step: int, *, mixed: bool = True
) -> None:
    images, labels = batch
    with torch.autocast(images.device.type, torch.bfloat16, enabled=mixed):
        loss = functional.cross_entropy(model(images), labels)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)


class _Block(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, before), nn.SiLU(), nn.Conv2d(before, after, 3, padding=1))
        self.second = nn.Sequential(nn.GroupNorm(8, after), nn.SiLU(), nn.Conv2d(after, after, 3, padding=1))
        self.time = nn.Linear(64, after)
        self.skip = nn.Conv2d(before, after, 1)

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        hidden = self.first(images) + self.time(times)[:, :, None, None]
        return self.skip(images) + self.second(hidden)


class _UNet(nn.Module):
    """Predicts the noise in images: three resolutions, with a skip connection at each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width, width * 2, width * 4]
        self.begin = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(
            _Block(before, after) for before, after in zip([width, *widths], widths, strict=False)
        )
        self.shrink = nn.ModuleList(nn.Conv2d(each, each, 3, stride=2, padding=1) for each in widths)
        self.middle = _Block(widths[-1], widths[-1])
        self.grow = nn.ModuleList(nn.ConvTranspose2d(each, each, 2, stride=2) for each in widths)
        self.up = nn.ModuleList(_Block(each * 2, max(each // 2, width)) for each in widths)
        self.end = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        angles = times[:, None] * torch.exp(torch.linspace(0, 6, 32, device=times.device))
        embedding = torch.cat([angles.sin(), angles.cos()], dim=1)
        hidden, kept = self.begin(images), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            hidden = block(hidden, embedding)
            kept.append(hidden)
            hidden = shrink(hidden)
        hidden = self.middle(hidden, embedding)
        for block, grow in zip(reversed(self.up), reversed(self.grow), strict=True):
            hidden = block(torch.cat([grow(hidden), kept.pop()], dim=1), embedding)
        return self.end(hidden)


def unet(size: Mapping[str, int]) -> Iterator[bytes]:
    device = begin(size["seed"])
    model = _UNet(size["width"]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    shape = (size["batch"], 3, size["pixels"], size["pixels"])
    pictures = torch.rand(shape, device=device) * 2 - 1
    for step in range(size["steps"]):
        times, noise = torch.rand(size["batch"], device=device), torch.randn(shape, device=device)
        part = times[:, None, None, None]
        with torch.autocast(device.type, torch.bfloat16):
            loss = functional.mse_loss(model((1 - part) * pictures + part * noise, times).float(), noise - pictures)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    drawn = _draw(model, torch.randn(shape, device=device), size["samples"])
    return as_bytes([*model.state_dict().values(), drawn])


@torch.no_grad()
def _draw(model: nn.Module, images: Tensor, steps: int) -> Tensor:
    """Turn noise into images."""
    model.eval()
    for step in range(steps):
        times = torch.full((len(images),), 1 - step / steps, device=images.device)
        with torch.autocast(images.device.type, torch.bfloat16):
            images = images - model(images, times).float() / steps
    return images
