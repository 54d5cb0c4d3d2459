"""Parked tensors of a program that is interrupted, with PyTorch on the CPU: it needs no card, but PyTorch, which is no
dependency of the tests."""

import io
from typing import Any

import pytest

from gpuyard.scripting import park_tensors
from gpuyard.scripting.park_tensors import TensorParking

torch: Any = pytest.importorskip("torch")


class Cudart:
    def cudaHostRegister(self, *_: int) -> int:  # noqa: N802 - CUDA's name
        return 1


class Parking(TensorParking):
    """Parks storages of the CPU."""

    def _storages(self) -> list[Any]:
        storages = {each.untyped_storage()._cdata: each for each in park_tensors._tensors(torch, self._things)}
        return [each.untyped_storage() for each in storages.values() if each.untyped_storage().nbytes()]


@pytest.fixture(autouse=True)
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def saved(thing: Any) -> bytes:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def trained() -> tuple[Any, Any]:
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(37, 41), torch.nn.Linear(41, 37, bias=False), torch.nn.BatchNorm1d(37))
    model.register_parameter("tied", model[0].weight)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 37)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def test_interrupted_tensors_have_their_values_in_ram() -> None:
    model, optimizer = trained()
    view, gradient = model[0].weight[3:, ::2], model[0].weight.grad
    expected = {name: each.clone() for name, each in model.state_dict().items()}
    moments = [each["exp_avg"].clone() for each in optimizer.state.values()]
    values = view.detach().clone(), gradient.clone()
    parking = Parking([model, optimizer])
    parking.reserve()
    assert parking.park() > 0
    assert model[0].weight.untyped_storage().nbytes() == 0
    assert parking.stay_in_ram() == 0
    assert not parking.is_parked
    assert all(torch.equal(each, expected[name]) for name, each in model.state_dict().items())
    assert all(torch.equal(each["exp_avg"], kept) for each, kept in zip(optimizer.state.values(), moments, strict=True))
    assert torch.equal(view, values[0]), "a view that is not among its things"
    assert torch.equal(model[0].weight.grad, values[1])
    assert model.tied is model[0].weight
    assert view.untyped_storage()._cdata == model[0].weight.untyped_storage()._cdata


def test_a_checkpoint_of_interrupted_tensors_has_all_values_and_is_no_larger() -> None:
    model, optimizer = trained()
    before, size = torch.load(io.BytesIO(saved(model.state_dict()))), len(saved(model.state_dict()))
    parking = Parking([model, optimizer])
    parking.park()
    parking.stay_in_ram()
    after = saved(model.state_dict())
    assert len(after) <= size + 4096, "not all of the host memory"
    assert all(torch.equal(each, before[name]) for name, each in torch.load(io.BytesIO(after)).items())


def test_a_storage_in_two_blocks_of_host_memory_is_whole() -> None:
    tensors = [torch.arange(200_000.0), torch.arange(600_000.0)]
    parking = Parking([tensors])
    parking._memory.reserve(1 << 20)
    parking.park()
    assert parking.stay_in_ram() == 0
    assert torch.equal(tensors[0], torch.arange(200_000.0))
    assert torch.equal(tensors[1], torch.arange(600_000.0))


def test_an_error_while_memory_is_given_back_leaves_the_tensors_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler of the program may raise it."""

    def fail() -> None:
        raise RuntimeError("stop")

    tensor = torch.arange(1000.0)
    parking = Parking([tensor])
    monkeypatch.setattr(torch.cuda, "empty_cache", fail)
    with pytest.raises(RuntimeError, match="stop"):
        parking.park()
    assert torch.equal(tensor, torch.arange(1000.0))
    assert parking.stay_in_ram() is None


def test_tensors_that_cannot_be_changed_are_counted() -> None:
    tensor = torch.arange(10.0).to(torch.complex64)
    conjugate = tensor.conj()
    parking = Parking([tensor])
    parking.park()
    assert parking.stay_in_ram() == 1
    assert torch.equal(tensor, torch.arange(10.0).to(torch.complex64))
    del conjugate
