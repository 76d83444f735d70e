"""Images on the worker: what it keeps, what it refuses, and that a fault is one request's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from parity.vision_families import VISION_FAMILIES, picture, place, preparation_of
from worker.conftest import load_executor
from worker.mini_scheduler import MiniScheduler, Sequence, greedy

from kvern.errors import KvernError
from kvern.media import content_hash
from kvern.v1 import error_pb2, media_pb2, worker_pb2
from kvern_worker.batch import Rows
from kvern_worker.executor import ModelExecutor
from kvern_worker.gpu.loading import check as check_gpu
from kvern_worker.images import EncoderCache
from kvern_worker.models.registry import load_hf_config
from kvern_worker.parallel.topology import Topology

FAMILY = VISION_FAMILIES["Qwen 2.5 VL"]
TEXT = [5, 6, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return FAMILY.save(FAMILY.make(), tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def executor(folder: Path) -> ModelExecutor:
    return load_executor(folder, threads=1)


class Watched(MiniScheduler):
    """Counts images as the results say."""

    def __init__(self, executor: ModelExecutor) -> None:
        super().__init__(executor)
        self.images = self.cached = 0

    def _collect(self, result: worker_pb2.StepResult, running: list[Sequence]) -> None:
        self.images += result.num_images
        self.cached += result.num_images_cached
        super()._collect(result, running)


def about(folder: Path, *seeds: int) -> Sequence:
    pieces = [TEXT]
    for seed in seeds:
        pieces += [picture(seed, 60, 90), TEXT]  # type: ignore[list-item]
    tokens, media = place(pieces, preparation_of(folder))  # type: ignore[arg-type]
    return Sequence(tokens, greedy(), 4, media=media)


def test_an_image_is_encoded_once(
    folder: Path, executor: ModelExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert executor._images is not None
    model, encoded = executor._images._model, []
    encode = model.encode
    monkeypatch.setattr(model, "encode", lambda *image: encoded.append(1) or encode(*image))
    scheduler = Watched(executor)
    first, again = about(folder, 1, 2), about(folder, 2, 1)
    scheduler.run([first])
    scheduler.run([again], chunk=5)
    assert (scheduler.images, scheduler.cached, len(encoded)) == (4, 2, 2)
    assert len(first.output) == len(again.output) == 4


def test_a_sequence_may_enter_with_more_than_its_prompt_computed(
    folder: Path, executor: ModelExecutor
) -> None:
    """As after a scheduler's death, when blocks of its answer are in the prefix cache too."""
    images, sequence = executor._images, about(folder, 1)
    assert images is not None
    images.clear()
    num_prompt = len(sequence.prompt)
    positions = []
    for computed in (num_prompt, num_prompt + 3):
        images.add(0, sequence.media, num_prompt, computed)
        starts, lengths = np.array([computed]), np.array([8])
        step = SimpleNamespace(positions=torch.arange(computed, computed + 8), images=None)
        images.begin(Rows(np.array([0]), starts, lengths, np.array([True])), step)  # type: ignore[arg-type]
        positions.append(step.positions.tolist())
    images.clear()
    assert positions[0][0] < num_prompt  # an image has fewer rotary positions than tokens
    assert positions[1] == [position + 3 for position in positions[0]]


def test_what_is_kept_of_images_is_bounded(folder: Path) -> None:
    small = load_executor(folder, threads=1, mm_processor_cache_gb=0)
    scheduler = Watched(small)
    expected = about(folder, 1, 2)
    scheduler.run([expected])
    again = about(folder, 1, 2)
    scheduler.run([again], chunk=5)
    # Only the newest is kept, and a chunk's end in the middle of an image costs no more than time.
    assert (scheduler.images, scheduler.cached) == (4, 0)
    assert again.output == expected.output
    cache = EncoderCache(max_bytes=800)
    for key in (b"a", b"b", b"a", b"c", b"d"):
        if cache.get(key) is None:
            cache.put(key, torch.zeros(100))
    assert cache.num_bytes == 800 and cache.get(b"d") is not None and cache.get(b"b") is None


def test_a_wrong_image_ends_its_own_sequence_only(folder: Path, executor: ModelExecutor) -> None:
    def changed(**fields: object) -> Sequence:
        sequence = about(folder, 3)
        item = media_pb2.MediaItem()
        item.CopyFrom(sequence.media[0])
        for name, value in fields.items():
            setattr(item, name, value)
        sequence.media = [item]
        return sequence

    good = about(folder, 4)
    pixels = good.media[0].pixels
    wrong = {
        "hash is not that of its pixels": changed(pixels=pixels),
        "not as many pixels": changed(pixels=pixels[:-3]),
        "tokens here, not": changed(length=2),
        "multiples of 28": changed(height=30),
        "outside the prompt": changed(offset=1000),
    }
    MiniScheduler(executor).run([*wrong.values(), good])
    for said, sequence in wrong.items():
        assert sequence.error is not None and said in sequence.error.message, (said, sequence.error)
    alone = about(folder, 4)
    MiniScheduler(executor).run([alone])
    assert good.error is None and good.output == alone.output


def test_a_model_of_texts_refuses_images(checkpoint: object, folder: Path) -> None:
    executor = load_executor(checkpoint("qwen2"), threads=1)  # type: ignore[operator]
    assert not executor.describe().model.images
    item = media_pb2.MediaItem(offset=0, length=1, tiles=1, height=28, width=28, pixels=bytes(28 * 28 * 3))
    item.hash = content_hash(item)
    sequence = Sequence([3, 4, 5], greedy(), 2, media=[item])
    MiniScheduler(executor).run([sequence])
    assert sequence.error is not None and sequence.error.code == error_pb2.ERROR_CODE_UNIMPLEMENTED


def test_what_does_not_see_yet_is_refused_by_name(folder: Path) -> None:
    file, config = load_hf_config(folder)
    with pytest.raises(KvernError, match="runs on CPUs only"):
        check_gpu(file, config, "fp32")
    with pytest.raises(KvernError, match="tensor-parallel-size 2 is not supported"):
        Topology(tensor=2).check_model(config, file)
