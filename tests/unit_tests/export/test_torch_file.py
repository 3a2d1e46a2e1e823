"""Files whose tensors are put in afterwards: torch's own to the byte, but for the id that torch draws."""

import tempfile
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.export.torch_file import TorchFile

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
tensors = st.lists(st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.sampled_from(DTYPES)), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(kinds=tensors, order=st.randoms())
def test_the_file_is_the_one_that_torch_writes(kinds: list, order) -> None:
    model = {f"t{number}": torch.randint(0, 99, shape).to(dtype) for number, (shape, dtype) in enumerate(kinds)}
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder) / "ours.pt", Path(folder) / "theirs.pt"
        announced = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in model.items()}
        file = TorchFile(ours, {"iteration": 7, "list": [1, "x"]}, "model", {**announced, "nothing": None})
        names = list(model)
        order.shuffle(names)
        for name in names:
            if model[name].numel():
                file.write(name, model[name])
        file.finish()
        with open(theirs, "wb") as stream:
            torch.save({"iteration": 7, "list": [1, "x"], "model": {**model, "nothing": None}}, stream)
        with zipfile.ZipFile(ours) as one, zipfile.ZipFile(theirs) as other:
            assert one.testzip() is None
            entries, expected = one.infolist(), other.infolist()
            assert [(e.filename, e.header_offset, e.file_size) for e in entries] == [
                (e.filename, e.header_offset, e.file_size) for e in expected
            ]
            assert all(one.read(e) == other.read(e) for e in entries if not e.filename.endswith("serialization_id"))
        for mapped in (False, True):
            found = torch.load(ours, weights_only=True, mmap=mapped)
            assert found["iteration"] == 7 and found["model"].pop("nothing") is None
            assert all(torch.equal(found["model"][name], tensor) for name, tensor in model.items())


def test_a_tensor_that_is_left_out_is_noticed(tmp_path: Path) -> None:
    file = TorchFile(tmp_path / "model.pt", {}, "model", {"a": ((2,), torch.float32), "b": ((3,), torch.float32)})
    file.write("a", torch.ones(2))
    with pytest.raises(AssertionError, match="lacks b"):
        file.finish()
    with pytest.raises(AssertionError):
        file.write("b", torch.ones(4))


@pytest.mark.slow
def test_beyond_four_gib_the_zip_format_is_another(tmp_path: Path) -> None:
    """The file has a hole where its first tensor is, it takes no room on the disk."""
    path, values = tmp_path / "model.pt", torch.rand(1000)
    file = TorchFile(path, {}, "model", {"large": ((5 * 2**30,), torch.uint8), "small": ((1000,), torch.float32)})
    file.write("small", values)
    file._due.clear()
    file.finish()
    found = torch.load(path, weights_only=True, mmap=True)["model"]
    assert torch.equal(found["small"], values) and not found["large"][-100:].any()
    with zipfile.ZipFile(path) as archive:
        (entry,) = [info for info in archive.infolist() if info.filename.endswith("data/1")]
        assert entry.header_offset > 2**32 and len(archive.read(entry)) == 4000, "zipfile compares the checksum"
