"""Tensors in files: equal when read back, shared where unchanged, refused when cut or changed in size."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

from rlbench.checkpoint import tensor_files
from rlbench.checkpoint.tensor_files import INDEX, read_resharded, read_tensors, write_tensors
from rlbench.errors import CheckpointError

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def some() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    found = {str(d): (torch.randn(3, 5, generator=random) * 9).to(d) for d in DTYPES}
    return found | {
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.5),
        "sliced": torch.arange(12).view(3, 4).T,
    }


@pytest.mark.parametrize("durable", [False, True])
def test_what_is_read_equals_what_was_written(tmp_path: Path, durable: bool) -> None:
    given = some()
    written = write_tensors(tmp_path / "a", given, durable=durable)
    found = read_tensors(tmp_path / "a")
    assert list(found) == list(given)
    for name, tensor in given.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert written.nbytes == written.fresh == sum(t.numel() * t.element_size() for t in given.values())


@pytest.mark.gpu
def test_what_a_gpu_holds_is_written_by_way_of_pinned_memory_and_equal(tmp_path: Path) -> None:
    host = some() | {"large": torch.randn(3 << 20, generator=torch.Generator().manual_seed(1))}
    given = {name: tensor.cuda() for name, tensor in host.items()}
    write_tensors(tmp_path / "a", given)
    given["large"].add_(1.0)  # the next copy must not reach what is written
    written = write_tensors(tmp_path / "b", given, before=tmp_path / "a")
    first, second = read_tensors(tmp_path / "a"), read_tensors(tmp_path / "b")
    assert all(torch.equal(first[name], tensor) for name, tensor in host.items())
    assert all(torch.equal(second[name], tensor.cpu()) for name, tensor in given.items())
    assert written.fresh == given["large"].nbytes


def test_unchanged_tensors_share_their_file_and_either_folder_may_go(tmp_path: Path) -> None:
    first = some()
    write_tensors(tmp_path / "a", first)
    second = first | {"scalar": torch.tensor(4.5), "torch.float32": first["torch.float32"].double()}
    written = write_tensors(tmp_path / "b", second, before=tmp_path / "a")
    assert written.fresh == 4 + 15 * 8, "the changed value, and the one of another dtype"
    for file in (tmp_path / "a").iterdir():
        file.unlink()
    found = read_tensors(tmp_path / "b")
    assert all(torch.equal(found[name], second[name]) for name in second)


def test_small_tensors_of_a_kind_share_a_file(tmp_path: Path) -> None:
    first = {
        f"policy/parameter/{i}.{n}": torch.full((n,), i % 2, dtype=torch.bool) for i in range(9) for n in (0, 1, 7)
    }
    first |= {"policy/buffer/x": torch.ones(3), "policy/parameter/large": torch.rand(1 << 20)}
    first |= {f"policy/parameter/after.{i}": torch.full((5,), float(i)) for i in range(3)}
    written = write_tensors(tmp_path / "a", first)
    assert len(list((tmp_path / "a").glob("*.bin"))) == 3, "small parameters, buffers, the large one"
    changed = first | {"policy/parameter/7.7": torch.zeros(7, dtype=torch.bool), "policy/buffer/x": torch.zeros(3)}
    again = write_tensors(tmp_path / "b", changed, before=tmp_path / "a")
    assert (again.nbytes, again.fresh) == (written.nbytes, written.nbytes - 4 * (1 << 20))
    assert write_tensors(tmp_path / "c", changed, before=tmp_path / "b").fresh == 0
    for folder, tensors in (("a", first), ("b", changed), ("c", changed)):
        read = read_tensors(tmp_path / folder)
        assert list(read) == list(tensors) and all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_a_file_of_other_tensors_is_not_shared(tmp_path: Path) -> None:
    one, two = torch.ones(4), torch.zeros(4)
    write_tensors(tmp_path / "a", {"p/x/1": one, "p/x/2": two})
    for number, other in enumerate([{"p/x/2": one, "p/x/1": two}, {"p/x/1": one}, {"p/x/1": one, "p/x/3": two}]):
        assert write_tensors(tmp_path / f"b{number}", other, before=tmp_path / "a").fresh
        read = read_tensors(tmp_path / f"b{number}")
        assert all(torch.equal(read[name], tensor) for name, tensor in other.items())


def test_a_kind_fills_several_files(tmp_path: Path) -> None:
    tensors = {f"p/x/{i}": torch.full((1 << 18,), float(i)) for i in range(17)}
    write_tensors(tmp_path / "a", tensors)
    sizes = sorted(file.stat().st_size for file in (tmp_path / "a").glob("*.bin"))
    assert sizes == [1 << 20, 8 << 20, 8 << 20]
    assert all(torch.equal(read, tensors[name]) for name, read in read_tensors(tmp_path / "a").items())


def test_what_is_frozen_is_not_written_again_with_what_is_trained(tmp_path: Path) -> None:
    tensors = {f"policy/parameter/{i}": torch.rand(50).requires_grad_(i % 2 == 0) for i in range(6)}
    whole = write_tensors(tmp_path / "a", tensors)
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.add_(tensor.requires_grad)
    again = write_tensors(tmp_path / "b", tensors, before=tmp_path / "a")
    assert (whole.fresh, again.fresh) == (6 * 200, 3 * 200)
    assert all(torch.equal(read, tensors[name]) for name, read in read_tensors(tmp_path / "b").items())


def test_writing_to_what_was_read_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", {"x": torch.ones(4)})
    read_tensors(tmp_path / "a")["x"].zero_()
    assert read_tensors(tmp_path / "a")["x"].tolist() == [1, 1, 1, 1]


def test_files_are_for_the_owner_alone(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", some())
    assert {oct(p.stat().st_mode & 0o777) for p in (tmp_path / "a").iterdir()} == {"0o600"}
    assert oct((tmp_path / "a").stat().st_mode & 0o777) == "0o700"


def test_a_cut_file_and_a_missing_index_are_named(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", {"x": torch.ones(4)})
    os.truncate(tmp_path / "a" / "0.bin", 15)
    with pytest.raises(CheckpointError, match=r"0\.bin \(x\) has 15 bytes, its index says 16"):
        read_tensors(tmp_path / "a")
    (tmp_path / "a" / INDEX).unlink()
    with pytest.raises(CheckpointError, match="no whole set of tensors"):
        read_tensors(tmp_path / "a")


def test_a_folder_that_exists_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(CheckpointError, match="could not be written"):
        write_tensors(tmp_path / "a", some())


def test_parts_of_a_tensor_are_joined_and_a_missing_one_is_refused(tmp_path: Path) -> None:
    whole = torch.arange(10.0).reshape(5, 2)
    folders = [tmp_path / f"rank-{rank}" for rank in range(2)]
    for rank, (folder, part) in enumerate(zip(folders, whole.chunk(2), strict=True)):
        write_tensors(folder, {"weight": part})
        index = json.loads((folder / INDEX).read_text())
        index["weight"]["shard"] = [0, rank, 2]
        (folder / INDEX).write_text(json.dumps(index))
    assert torch.equal(read_resharded(folders[::-1], lambda name: None)["weight"], whole)
    with pytest.raises(CheckpointError, match="weight"):
        read_resharded(folders[1:], lambda name: None)


def test_a_tensor_whose_ranks_hold_terms_of_a_sum_is_refused(tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1))
        tensor = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0), Partial()])
        with pytest.raises(CheckpointError, match="cannot be kept"):
            write_tensors(tmp_path / "out", {"weight": tensor})
    finally:
        torch.distributed.destroy_process_group()


def test_a_file_is_whole_however_little_the_system_takes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a tensor of more than 2 GiB, or of more tensors than one call takes."""
    taken, writev = [], os.writev

    def little(file: int, parts: list[memoryview]) -> int:
        taken.append(writev(file, [parts[0][:7]]))
        return taken[-1]

    monkeypatch.setattr(os, "writev", little)
    monkeypatch.setattr(tensor_files, "PARTS", 3)
    given = {f"a/b/{i}": torch.randn(i) for i in range(1, 12)}
    for folder, spare in (("a", []), ("b", [tmp_path / "a"])):  # a new file, and one that is written over
        write_tensors(tmp_path / folder, given, spare=spare)
        assert len(taken) > 11 and max(taken) == 7
        assert all(torch.equal(tensor, given[name]) for name, tensor in read_tensors(tmp_path / folder).items())
        given = {name: tensor + 1 for name, tensor in given.items()}


def test_what_is_known_to_be_unchanged_is_shared_without_a_look_at_it(tmp_path: Path) -> None:
    given = {"p/parameter/w": torch.randn(8), "p/parameter/v": torch.randn(3), "p/buffer/b": torch.randn(5)}
    write_tensors(tmp_path / "a", given)
    second = {name: tensor + 1 for name, tensor in given.items()}
    written = write_tensors(
        tmp_path / "b", second, before=tmp_path / "a", unchanged=lambda name: "/buffer/" not in name
    )
    assert written.fresh == 20 and written.nbytes == 64
    read = read_tensors(tmp_path / "b")
    assert list(read) == list(given)
    for name, tensor in (given | {"p/buffer/b": second["p/buffer/b"]}).items():
        assert torch.equal(read[name], tensor)
    third = {
        "p/parameter/w": torch.randn(8),
        "p/parameter/more": torch.randn(2),
    }  # of a file of others nothing is shared
    assert write_tensors(tmp_path / "c", third, before=tmp_path / "b", unchanged=lambda name: True).fresh == 40


def test_a_write_that_fails_in_a_thread_fails_and_one_that_is_stopped_waits_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {f"a{i}/b/w": torch.randn(4) for i in range(6)}

    def full(file: int, parts: list[memoryview]) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "writev", full)
        with pytest.raises(CheckpointError, match="No space left"):
            write_tensors(tmp_path / "a", given)

    def between(nbytes: int) -> None:
        if (tmp_path / "b" / "2.bin").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tensors(tmp_path / "b", given | {f"c{i}/b/w": torch.randn(4) for i in range(64)}, between=between)
    sizes = [path.stat().st_size for path in (tmp_path / "b").iterdir()]
    assert 3 <= len(sizes) < 70 and set(sizes) == {16}, "what was begun is whole, and nothing is written after it"
