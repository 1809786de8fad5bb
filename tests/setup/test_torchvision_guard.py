"""torchvision's CUDA wheel beside a CPU torch: importable in every process, at no cost to the others."""

import subprocess
import sys

import pytest

from rlbench.setup.guard import rlbench_torchvision_guard as guard

torch = pytest.importorskip("torch")


def run(code: str) -> str:
    """Run `code` in a new Python of this environment and return what it printed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_torchvision_is_importable_in_this_process_and_in_a_child():
    import torchvision.transforms.v2.functional as functional

    image = functional.resize(torch.ones(3, 4, 4), [8, 8])
    assert image.shape == (3, 8, 8)
    assert run("import torchvision; print(torchvision.__name__)") == "torchvision"


def test_looking_for_torchvision_imports_no_torch():
    find = "from importlib.util import find_spec; found = find_spec('torchvision') is not None"
    assert run(f"{find}; import sys; print(found, 'torch' in sys.modules)") == "True False"


def test_a_start_of_python_loads_the_guard_alone():
    heavy = "{'torch', 're', 'rlbench'} & set(sys.modules)"
    assert run(f"import sys; print('rlbench_torchvision_guard' in sys.modules, *({heavy}))") == "True"


def test_the_operators_have_no_kernel_and_say_so():
    import torchvision  # noqa: F401

    if torch.version.cuda is not None:
        pytest.skip("a CUDA build of torch: the operators are torchvision's own")
    with pytest.raises(NotImplementedError, match="torchvision::nms"):
        torch.ops.torchvision.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)


@pytest.mark.parametrize(
    ("version", "is_cuda"),
    [("'0.28.0+cu130'", True), ("'0.28.0+cpu'", False), ("'0.28.0'", False), (None, False)],
)
def test_only_a_cuda_build_is_guarded(tmp_path, version, is_cuda):
    if version is not None:
        (tmp_path / "version.py").write_text(f"__version__ = {version}\ngit_version = 'x'\n")
    assert guard._is_cuda_build(str(tmp_path / "__init__.py")) is is_cuda


@pytest.mark.slow
def test_a_qwen_vl_processor_can_be_constructed():
    from tests.ranks import said_by_fork  # here: the other tests of this file are quick

    code = """
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor
words = ["<unk>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>")),
    unk_token="<unk>", extra_special_tokens={})
processor = Qwen2_5_VLProcessor(Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor())
from PIL import Image
pixels = processor.image_processor([Image.new("RGB", (56, 56))], return_tensors="pt")["pixel_values"]
print(type(processor).__name__, tuple(pixels.shape))
"""
    assert said_by_fork(code).strip() == "Qwen2_5_VLProcessor (16, 1176)"
