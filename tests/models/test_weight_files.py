"""Parts of tensors in safetensors files are those that safetensors itself reads. Fingerprints have all bits of them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import modeling_utils

from rapidformer_templates.models.adapters import SUMMED, fingerprint
from rapidformer_templates.models.weight_files import FileTensor, join, tensors_read_by
from tests.support.allocations import measured_allocations


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {f"matrix.{i}": torch.randn(32, 64 + i, dtype=torch.bfloat16) for i in range(3)}
    tensors |= {f"expert.{i}": torch.randn(3, 40, 64) for i in range(4)}
    tensors |= {"small": torch.randn(5), "number": torch.tensor(2.0), "large": torch.randn(3, 1024, 1031).half()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path / "model.safetensors"


def _tensors_in(path: Path) -> dict[str, FileTensor]:
    """Open a file as transformers does, and return its tensors that can be read in parts."""
    found: dict[str, FileTensor] = {}

    def record(tensor: FileTensor) -> torch.Tensor:
        found[name] = tensor
        return torch.empty(0)

    with tensors_read_by(record), modeling_utils.safe_open(path, framework="pt", device="cpu") as file:
        for name in file.keys():  # noqa: SIM118 - it is not a dictionary
            whole = file.get_slice(name)[...]
            assert name in found or torch.equal(whole, load_file(path)[name])
    return found


def _parts(tensor: FileTensor, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    elements = tensor.shape.numel()
    for start, stop in ((0, elements), (0, 1), (777, 1900), (elements - 3, elements), (9, 9)):
        part = torch.empty(stop - start, dtype=dtype)
        tensor.read_into(part, start)
        yield slice(start, stop), part


def test_parts_have_the_elements_of_the_whole_tensor(path: Path) -> None:
    whole, tensors = load_file(path), _tensors_in(path)
    assert tensors.keys() == whole.keys() - {"small", "number"}
    for name, tensor in tensors.items():
        assert (tensor.shape, tensor.dtype) == (whole[name].shape, whole[name].dtype)
        for dtype in (tensor.dtype, torch.float64):
            for where, part in _parts(tensor, dtype):
                assert torch.equal(part, whole[name].flatten()[where].to(dtype)), (name, where)


@pytest.mark.parametrize(("kind", "dim"), [("matrix", 1), ("expert", 0), ("expert", 1)])
def test_joined_tensors_have_the_elements_of_a_concatenation(path: Path, kind: str, dim: int) -> None:
    whole, tensors = load_file(path), _tensors_in(path)
    names = [name for name in tensors if name.startswith(kind)]
    joined = join([tensors[name] for name in names], dim)
    if kind == "matrix":  # its rows have 128 bytes
        assert joined is None
        return
    assert joined is not None
    expected = torch.cat([whole[name] for name in names], dim=dim)
    assert joined.shape == expected.shape
    for where, part in _parts(joined, torch.float32):
        assert torch.equal(part, expected.flatten()[where])
    twice = join([joined, joined], 1)
    assert twice is not None
    for where, part in _parts(twice, torch.float32):
        assert torch.equal(part, torch.cat([expected, expected], dim=1).flatten()[where])


def test_tensors_of_several_types_are_not_joined(path: Path) -> None:
    tensors = _tensors_in(path)
    assert join([tensors["expert.0"], tensors["large"]], 0) is None


def test_a_file_that_is_too_short_is_an_error(path: Path) -> None:
    tensor = max(_tensors_in(path).values(), key=lambda tensor: tensor.ranges[0].start)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(OSError, match="ends inside a tensor"):
        tensor.read_into(torch.empty(tensor.shape.numel(), dtype=tensor.dtype), 0)


def test_files_are_read_as_usual_outside_of_the_context(path: Path) -> None:
    _tensors_in(path)
    with modeling_utils.safe_open(path, framework="pt", device="cpu") as file:
        assert torch.equal(file.get_slice("large")[...], load_file(path)["large"])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_files_are_not_mapped(path: Path) -> None:
    def mappings() -> str:
        with modeling_utils.safe_open(path, framework="pt", device="cpu", backend="mmap") as file:
            file.get_slice("small")[...]
            return Path("/proc/self/maps").read_text()

    assert str(path) in mappings()
    with tensors_read_by(lambda tensor: None):
        assert str(path) not in mappings()


@pytest.mark.parametrize("odd", [0, 1])
def test_all_bits_of_a_tensor_are_summed(odd: int) -> None:
    values = torch.arange(2 * SUMMED + 20 + odd, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    content = values.view(torch.int16).numpy().tobytes()
    words = torch.frombuffer(bytearray(content[: len(content) // 4 * 4]), dtype=torch.int32)
    total = int(words.double().sum()) + sum(content[len(words) * 4 :])  # exact: far below 2 ** 53
    assert fingerprint(values).split()[-2] == str(total)


def test_a_fingerprint_needs_less_memory_than_its_tensor() -> None:
    values = torch.ones(24 << 20)
    fingerprint(values)
    with measured_allocations() as allocations:
        fingerprint(values)
    assert 0 < allocations.peak < 0.6 * values.nbytes
