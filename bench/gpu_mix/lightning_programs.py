"""Training with PyTorch Lightning: a convolutional network that predicts time series."""

from collections.abc import Iterator, Mapping

import numpy as np
import pytorch_lightning as lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from bench.gpu_mix import torch_determinism
from bench.gpu_mix.torch_determinism import as_bytes, begin

sees_gpu, peak_mb = torch_determinism.sees_gpu, torch_determinism.peak_mb


class _Series(Dataset[Tensor]):
    """Sums of random waves, which the worker processes compute."""

    def __init__(self, seed: int, count: int, length: int) -> None:
        self._seed, self._count, self._length = seed, count, length

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int) -> Tensor:
        random = np.random.default_rng((self._seed, place))
        times = np.arange(self._length + 1)
        frequencies, phases = random.uniform(0.001, 0.3, 12), random.uniform(0, 6.28, 12)
        waves = np.sin(times[:, None] * frequencies + phases).sum(axis=1) + random.normal(0, 0.1, len(times))
        return torch.from_numpy(waves.astype(np.float32))


class _Forecaster(lightning.LightningModule):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.begin = nn.Conv1d(1, width, 1)
        self.layers = nn.ModuleList(nn.Conv1d(width, 2 * width, 3, dilation=2 ** (n % 8)) for n in range(layers))
        self.end = nn.Conv1d(width, 1, 1)

    def forward(self, series: Tensor) -> Tensor:
        hidden = self.begin(series)
        for layer in self.layers:
            before = nn.functional.pad(hidden, (2 * layer.dilation[0], 0))  # a prediction knows only what came before
            hidden = hidden + nn.functional.glu(layer(before), dim=1)
        return self.end(hidden)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        series = batch[:, None, :]
        return nn.functional.mse_loss(self(series[..., :-1]), series[..., 1:])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def forecaster(size: Mapping[str, int]) -> Iterator[bytes]:
    device = begin(size["seed"])
    lightning.seed_everything(size["seed"])
    series = _Series(size["seed"], size["batch"] * size["steps"], size["length"])
    model = _Forecaster(size["width"], size["layers"])
    trainer = lightning.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        max_epochs=1,
        deterministic=True,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(series, batch_size=size["batch"], num_workers=2))
    print(f"{trainer.global_step} steps", flush=True)
    return as_bytes(model.state_dict().values())
