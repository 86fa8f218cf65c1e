"""Tests of media: images and audio reach the stages that need them, with the samples to which they belong."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeshard.batch.read import RowDims, read_batch
from pipeshard.errors import BatchError
from pipeshard.graph.trace import trace
from tests.covering import covering
from tests.families import layers_of
from tests.parity.build import batch, build
from tests.parity.check import Reference
from tests.parity.entries import Entry, find
from tests.parity.images import insert, token
from tests.parity.inputs import make_batch
from tests.parity.tiny import FIRST_TEXT
from tests.pool import Pool
from tests.unsplit import Split, gradient_error

pytestmark = pytest.mark.local

IMAGES = ("llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "paligemma", "idefics3", "smolvlm", "mistral3")
SOUNDS = ("whisper", "speech_to_text")
LOOKED_AT = ("idefics3", "smolvlm")  # glue, on every stage, looks for images that are all zeros
SENSES = re.compile(r"vis|encoder")  # in the names of the layers that see or hear


def entry_of(name: str) -> Entry:
    return next(entry for entry in find(name) if entry.task in ("image-text-to-text", "speech-seq2seq"))


def one_step(name: str) -> list[str]:
    """A step of two microbatches: what differs, and whether a stage has media that it does not need.

    Three stages are cut amid the layers that see or hear and amid those of the text, two only the latter.
    """
    rank, p = dist.get_rank(), dist.get_world_size()
    model = build(entry_of(name))
    data, unsplit = batch(entry_of(name), model), copy.deepcopy(model)
    layers = layers_of(model)
    senses, text = [one for one in layers if SENSES.search(one)], [one for one in layers if not SENSES.search(one)]
    split = Split(model, p, data, num_microbatches=2, partition=[senses[1], text[1]] if p == 3 else [text[1]])
    expected = Reference.of(unsplit, data, 2).loss
    stage = split.model.pipeline.stages.whole[0]
    with mock.patch.object(stage, "begin", wraps=stage.begin) as begin:
        found = different(split, unsplit, split.backward(data)["loss"], expected)
    microbatches = begin.call_args.args[0]
    with torch.no_grad():
        whole = unsplit(**data).loss
    if not abs(float(expected / whole) - 1) <= 1e-5:
        found.append(f"loss of the parts {expected.item()!r}, of the batch {whole.item()!r}")
    for microbatch in microbatches:
        media = microbatch.batch.tensors["input_features" if name in SOUNDS else "pixel_values"]
        if any(media.stride()) != (rank == 0 or name in LOOKED_AT):
            found.append(f"on stage {rank} media take {'no ' * (not any(media.stride()))}memory")
    return [f"{name} p={p}: {what}" for what in found]


def different(split: Split, unsplit: nn.Module, loss: Tensor, expected: Tensor) -> list[str]:
    found = [] if torch.equal(loss, expected) else [f"loss {loss.item()!r}, unsplit {expected.item()!r}"]
    error = gradient_error(split, unsplit)
    return found if error < 1e-6 else [*found, f"gradients differ by {error:.1e}"]


@pytest.mark.turns
@pytest.mark.processes
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "p"), covering(IMAGES + SOUNDS, [2, 3], strength=1))
def test_one_step(pool: Pool, name: str, p: int) -> None:
    assert not [what for found in pool.run(one_step, p, name, timeout=120) for what in found]


Sizes = Sequence[Sequence[tuple[int, int]]]
# Patches (height, width) of the images of each row, and where the microbatches begin and end, step by step.
SMALL, WIDE, TALL, LONG = (4, 4), (4, 8), (8, 4), (2, 6)
STEPS: Sequence[tuple[Sizes, Sequence[int]]] = (
    ([[SMALL], [WIDE], [SMALL, WIDE], []], (0, 2, 4)),
    ([[WIDE], [SMALL, SMALL], [], []], (0, 2, 4)),  # a microbatch without images
    ([[TALL, LONG], [], [LONG], [WIDE]], (0, 1, 2, 3, 4)),  # other sizes; as many images as rows, but not one each
    ([[], [], [], []], (0, 2, 4)),
    ([[], [LONG], [], [TALL]], (0, 2, 3, 4)),
)


def album(model: Any, sizes: Sizes, seed: int) -> dict[str, Tensor]:
    """A batch whose row k has images of `sizes[k]`: Qwen's as flat patches, Llava's all of the same size."""
    generator, count = torch.Generator().manual_seed(seed), sum(map(len, sizes))
    flat, image = hasattr(model.config.vision_config, "spatial_merge_size"), token(model)
    tokens = [[height * width // 4 if flat else 16 for height, width in row] for row in sizes]
    pieces = [[one for number in row for one in (*[image] * number, FIRST_TEXT)] for row in tokens]
    text = make_batch("image-text-to-text", model, seed=seed)
    data = insert(text, pieces, **({"mm_token_type_ids": image} if flat else {}))
    if not count:
        return data
    if not flat:
        return {**data, "pixel_values": torch.randn(count, 3, 32, 32, generator=generator)}
    grid = torch.tensor([(1, *size) for row in sizes for size in row])
    patches = torch.randn(int(grid.prod(1).sum()), 3 * 2 * 8 * 8, generator=generator)
    return {**data, "pixel_values": patches, "image_grid_thw": grid}


def part(data: dict[str, Tensor], sizes: Sizes, rows: slice) -> dict[str, Tensor]:
    """Some rows of an album, cut by hand."""
    first, own = sum(map(len, sizes[: rows.start])), sum(map(len, sizes[rows]))
    media = {name: data[name] for name in ("pixel_values", "image_grid_thw") if name in data}
    text = {name: value[rows] for name, value in data.items() if name not in media}
    if not own:
        return text
    if "image_grid_thw" not in media:
        return {**text, "pixel_values": media["pixel_values"][first : first + own]}
    edges = [0, *itertools.accumulate(media["image_grid_thw"].prod(1).tolist())]
    patches = media["pixel_values"][edges[first] : edges[first + own]]
    return {**text, "pixel_values": patches, "image_grid_thw": media["image_grid_thw"][first : first + own]}


def loss_by_hand(model: Any, parts: Sequence[dict[str, Tensor]]) -> Tensor:
    """The parts' losses weighed by their shifted labels, and summed in order; the gradients stay in the model."""
    counts = [int((one["labels"][:, 1:] != -100).sum()) for one in parts]
    losses = []
    for one, count in zip(parts, counts):
        loss, weight = model(**one).loss, count / sum(counts)
        loss.backward(torch.full_like(loss, weight))
        losses.append(loss.detach() * weight)
    return sum(losses[1:], losses[0])


def several_steps(name: str, boosted: Sizes) -> list[str]:
    """Another number of images in each row, and other sizes in each step, after one boost with the images `boosted`:
    what differs."""
    model = build(entry_of(name))
    unsplit, found = copy.deepcopy(model), []
    split = Split(model, dist.get_world_size(), album(model, boosted, 0), num_microbatches=1)
    for step, (sizes, edges) in enumerate(STEPS):
        data = album(unsplit, sizes, step)
        parts = [part(data, sizes, slice(a, b)) for a, b in itertools.pairwise(edges)]
        split.cut(len(parts))
        unsplit.zero_grad()
        split.optimizer.zero_grad()
        expected = loss_by_hand(unsplit, parts)
        what = different(split, unsplit, split.backward(data)["loss"], expected)
        found += [f"{name} p={dist.get_world_size()} step {step}: {difference}" for difference in what]
    return found


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "p"), covering(["llava", "qwen2_vl"], [2, 3], strength=1))
def test_several_steps(pool: Pool, name: str, p: int) -> None:
    assert not [what for found in pool.run(several_steps, p, name, STEPS[0][0], timeout=120) for what in found]


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_images_in_later_rows_alone(pool: Pool, name: str) -> None:
    """A user trained on text and images, and the first two rows at boost were text. On three stages, the first step
    was refused, with advice to boost with that very batch; on two, the first one had the tower, beyond its share."""
    later = [[], [], [WIDE], [SMALL]]
    assert not [what for found in pool.run(several_steps, 3, name, later, timeout=120) for what in found]


@pytest.mark.turns
def test_the_trace_has_every_medium_of_the_batch() -> None:
    model = build(entry_of("qwen2_vl"))
    units = [{call.unit for call in trace(model, album(model, [[], [], *rows], 0)).calls} for rows in ([], [[WIDE]])]
    assert not any("visual" in unit for unit in units[0]) and any("visual" in unit for unit in units[1])


def reader(**config: Any) -> nn.Module:
    model: Any = nn.Module()
    model.config, model.main_input_name = SimpleNamespace(**config), "input_ids"
    return model


def rows_of(*tokens: int) -> Tensor:
    """A row for each number, with as many tokens 3, of six at most."""
    return torch.tensor([[7, *[3] * count, *[8] * (6 - count)] for count in tokens])


def ids_of(*rows: str) -> Tensor:
    """A row for each string, with the token 3 for each i."""
    return torch.tensor([[3 if letter == "i" else 8 for letter in row] for row in rows])


READER = reader(image_token_id=3, audio_token_id=5)
NUMBERS = torch.arange(40.0)[:, None]


def test_flat_patches_go_with_the_tokens_of_their_row() -> None:
    grid = torch.tensor([(1, 2, 2), (1, 4, 2), (1, 2, 4)])  # four patches a token
    data = {"input_ids": rows_of(1, 0, 4), "pixel_values": NUMBERS[:20], "image_grid_thw": grid}
    read = read_batch(READER, data)
    assert read.owners == {"pixel_values": (4, 0, 16), "image_grid_thw": (1, 0, 2)}
    first, second, third = read.split(3)
    assert torch.equal(first.data["pixel_values"], NUMBERS[:4])
    assert second.data["pixel_values"] is None and second.data["image_grid_thw"] is None
    assert torch.equal(third.data["pixel_values"], NUMBERS[4:20])
    assert torch.equal(third.data["image_grid_thw"], grid[1:])


def test_images_go_with_the_tokens_of_their_row() -> None:
    """Also where there are as many images as rows; one image in each row is the ordinary case, without owners."""
    read = read_batch(READER, {"input_ids": rows_of(2, 0, 4), "pixel_values": NUMBERS[:3]})
    assert read.owners == {"pixel_values": (1, 0, 2)}
    assert read_batch(READER, {"input_ids": rows_of(2, 2, 2), "pixel_values": NUMBERS[:3]}).owners == {}


def test_the_frame_spacing_of_videos_goes_with_them() -> None:
    """A user trained Qwen2.5-VL on videos of several frame rates: the positions of every video of the second microbatch
    used the frame spacing of the batch's first video, and nothing failed."""
    grid, spacing = torch.tensor([(1, 2, 2), (1, 4, 2), (1, 2, 4)]), torch.tensor([0.5, 1.0, 2.0])
    data = {"input_ids": rows_of(1, 0, 2, 2), "pixel_values_videos": NUMBERS[:20], "video_grid_thw": grid}
    read = RowDims(reader(video_token_id=3)).read({**data, "second_per_grid_ts": spacing})
    parts = [part.data["second_per_grid_ts"] for part in read.split(4)]
    assert [None if part is None else part.tolist() for part in parts] == [[0.5], None, [1.0], [2.0]]


@pytest.mark.parametrize("make", [list, np.array], ids=["list", "array"])
def test_a_list_of_numbers_goes_with_its_videos(make: Any) -> None:
    """A collator may keep the frame spacing as a list: every microbatch received the whole list, so that its videos
    used the spacing of the batch's first videos; with as many videos as samples, each sample received one entry."""
    grid, model = torch.tensor([(1, 2, 2), (1, 4, 2), (1, 2, 4)]), reader(video_token_id=3)
    data = {"pixel_values_videos": NUMBERS[:20], "video_grid_thw": grid, "second_per_grid_ts": make([0.5, 1.0, 2.0])}
    for tokens, expected in (((1, 0, 2, 2), [[0.5], None, [1.0], [2.0]]), ((1, 0, 4), [[0.5], None, [1.0, 2.0]])):
        read = RowDims(model).read({"input_ids": rows_of(*tokens), **data})
        parts = [part.data["second_per_grid_ts"] for part in read.split(len(tokens))]
        assert [None if part is None else list(part) for part in parts] == expected
        assert read.entries.keys() == {"second_per_grid_ts"}
    whole = RowDims(model).read({"input_ids": rows_of(1, 0, 2, 2), **data, "video_mean": make([0.1, 0.2])})
    assert [list(part.data["video_mean"]) for part in whole.split(2)] == [[0.1, 0.2]] * 2


@pytest.mark.parametrize(
    ("rows", "counts"),
    [(("iii.ii.", ".......", ".iiiiii", "i......"), (2, 0, 1, 1)), (("iii.ii.", ".iiiiii", "i.ii.i."), (2, 1, 3))],
)
def test_images_of_any_resolution_are_runs_of_tokens(rows: Sequence[str], counts: tuple[int, ...]) -> None:
    """A user trained LLaVA-NeXT, whose images take tokens by their shape, with two images in a row. With as many images
    as rows, each row got one image, which the model refused; otherwise, the batch was refused."""
    images = torch.arange(4.0 * sum(counts)).view(-1, 2, 2)
    data = {"input_ids": ids_of(*rows), "pixel_values": images, "image_sizes": torch.full((len(images), 2), 30)}
    assert RowDims(READER).read(data).owners == {"pixel_values": counts, "image_sizes": counts}


@pytest.mark.parametrize("text", ["i.i.", "ii.."])
def test_images_padded_to_the_most_of_a_row_go_with_their_row(text: str) -> None:
    """A user trained Idefics 3 with 2, 1, 1 and no images in four rows. Its processor stacks and pads the images of a
    row; as four images take equal numbers of tokens, they were split as if nothing were padded."""
    images = {"pixel_values": torch.rand(4, 2, 3, 2, 2), "pixel_attention_mask": torch.ones(4, 2, 2, 2)}
    data = {"input_ids": ids_of(text, "i...", "...i", "...."), **images}
    assert read_batch(READER, data).owners == {}


def test_stacked_images_of_rows_without_any_are_padding() -> None:
    """Four rows of Mllama with two adjacent, one, no and no images, each of one token."""
    data = {"input_ids": ids_of("ii..", "i...", "....", "...."), "pixel_values": torch.rand(4, 2, 4, 3, 2, 2)}
    assert read_batch(READER, data).owners == {}


def test_samples_taken_in_another_order_take_their_media_along() -> None:
    read = read_batch(READER, {"input_ids": rows_of(2, 0, 4), "pixel_values": NUMBERS[:3]})
    taken = read.take(torch.tensor([2, 0, 0]))
    assert taken.data["pixel_values"].flatten().tolist() == [1, 2, 0, 0]
    assert taken.owners == {"pixel_values": (2, 1, 1)}


def test_counts_in_the_batch_tell_whose_images_they_are() -> None:
    data = {"input_ids": rows_of(1, 1, 1), "pixel_values": NUMBERS[:5], "num_patches": torch.tensor([1, 3, 1])}
    read = read_batch(reader(), data)
    assert read.owners == {"pixel_values": (1, 3, 1)}
    assert [len(part.data["pixel_values"]) for part in read.split(3)] == [1, 3, 1]


def test_counts_per_row_come_before_tokens() -> None:
    """DeepSeek-OCR 2 with one image per row, and one patch of the second image: its pixels are not four patches side by
    side."""
    data = {"input_ids": rows_of(2, 3, 2, 2), "pixel_values": torch.rand(4, 3, 8, 8)}
    local = {"pixel_values_local": torch.rand(1, 3, 8, 8), "num_local_patches": torch.tensor([0, 1, 0, 0])}
    assert read_batch(READER, {**data, **local}).owners == {"pixel_values_local": (0, 1, 0, 0)}


def test_counts_of_one_kind_are_not_of_another() -> None:
    """Gemma 4 on two rows, each with a video of two frames, and with three and one images: the images were split by
    the numbers of frames, as there are as many."""
    frames = {"pixel_values_videos": NUMBERS[:4], "num_frames_per_video": torch.tensor([2, 2])}
    ids = torch.tensor([[3, 8, 3, 8, 3, 5, 5], [3, 8, 8, 8, 8, 5, 5]])
    read = read_batch(
        reader(image_token_id=3, video_token_id=5), {"input_ids": ids, "pixel_values": NUMBERS[:4], **frames}
    )
    assert read.owners == {"pixel_values": (3, 1), "pixel_values_videos": (2, 2)}


def test_media_of_two_kinds_are_told_apart() -> None:
    ids = torch.tensor([[3, 3, 5, 8], [8, 8, 5, 5]])
    data = {"input_ids": ids, "pixel_values": NUMBERS[:1], "input_features": NUMBERS[:3]}
    assert read_batch(READER, data).owners == {"pixel_values": (1, 0), "input_features": (1, 2)}


def test_media_of_nobody_are_not_cut() -> None:
    """Five images, three rows, and nothing that says whose they are: one microbatch takes them all."""
    data = {"input_ids": rows_of(1, 1, 1), "pixel_values": NUMBERS[:5]}
    for model in (reader(), READER):
        read = read_batch(model, data)
        (whole,) = read.split(1)
        assert torch.equal(whole.data["pixel_values"], NUMBERS[:5])
        with pytest.raises(BatchError, match=r"pixel_values has 5 entries for 3 samples.*pass num_microbatches=1"):
            read.split(2)


def test_videos_of_several_frames_go_with_their_row() -> None:
    """A user trained Gemma 4 on text and videos. All frames are in one leaf, and `num_frames_per_video` has one entry
    per video: every microbatch received all of it, so the model failed."""
    frames = {"pixel_values_videos": NUMBERS[:4], "video_position_ids": torch.arange(8).view(4, 2)}
    data = {"input_ids": rows_of(2, 0, 2, 0), **frames, "num_frames_per_video": torch.tensor([2, 2])}
    read = RowDims(reader(video_token_id=3)).read(data)
    assert read.owners == {**dict.fromkeys(frames, (2, 0, 2, 0)), "num_frames_per_video": (1, 0, 1, 0)}
    parts = [part.data["num_frames_per_video"] for part in read.split(4)]
    assert [None if part is None else part.tolist() for part in parts] == [[2], None, [2], None]


def test_as_many_videos_as_rows_go_with_the_tokens_of_their_row() -> None:
    """Gemma 4 on four rows with two, no, one and one videos: their frames were taken for those of one video per row."""
    data = {"input_ids": rows_of(5, 0, 2, 1), "pixel_values_videos": NUMBERS[:8]}
    read = RowDims(reader(video_token_id=3)).read({**data, "num_frames_per_video": torch.tensor([3, 2, 2, 1])})
    assert read.owners == {"pixel_values_videos": (5, 0, 2, 1), "num_frames_per_video": (2, 0, 1, 1)}


@pytest.mark.parametrize(
    ("counts", "owners", "parts"),
    [
        ([2, 1], {"batch_num_images": (1, 1, 0)}, [[2], [1], None]),
        ([2, 1, 0], {}, [[2], [1], [0]]),  # of a collator that also counts none
        ([1, 1, 1], {"batch_num_images": (2, 1, 0)}, [[1, 1], [1], None]),  # of images in one list
    ],
)
def test_counts_of_the_samples_with_images_go_with_these_samples(
    counts: list[int], owners: dict[str, tuple[int, ...]], parts: list[list[int] | None]
) -> None:
    """A user trained LLaVA-OneVision, whose processor counts the images of each sample that has any, on three rows with
    two, one and no images: every microbatch received the counts of all, and the model failed."""
    data = {"input_ids": ids_of("i.iii.", "ii....", "......"), "pixel_values": NUMBERS[:3].view(3, 1, 1, 1)}
    sizes = {"image_sizes": torch.full((3, 2), 30)}
    read = RowDims(READER).read({**data, **sizes, "batch_num_images": torch.tensor(counts)})
    assert read.owners == {**dict.fromkeys(["pixel_values", "image_sizes"], (2, 1, 0)), **owners}
    of_rows = [part.data["batch_num_images"] for part in read.split(3)]
    assert [None if part is None else part.tolist() for part in of_rows] == parts


@pytest.mark.parametrize(
    ("tokens", "grid"),
    [
        ((4, 2), [(1, 4, 4), (1, 2, 4)]),
        ((4, 0, 2), [(1, 4, 4), (1, 4, 2)]),
        ((3, 0, 3, 2), [(1, 2, 6)] * 2 + [(1, 4, 2)]),
    ],
)
def test_a_mask_of_merged_patches_goes_with_its_video(tokens: Sequence[int], grid: list[tuple[int, int, int]]) -> None:
    """A user trained VideoLLaMA 3 on videos. Its mask has an entry for each four patches, and every microbatch received
    all of it, or an error advised to split it into equal parts."""
    count = sum(math.prod(size) for size in grid)
    data = {"input_ids": rows_of(*tokens), "pixel_values_videos": NUMBERS[:count], "video_grid_thw": torch.tensor(grid)}
    mask = torch.arange(count // 4) % 3 > 0
    read = RowDims(reader(video_token_id=3)).read({**data, "video_compression_mask": mask})
    parts = [part.data["video_compression_mask"] for part in read.split(len(tokens))]
    expected = mask.split(list(tokens))
    assert all(torch.equal(part, of_row) if len(of_row) else part is None for part, of_row in zip(parts, expected))


def test_videos_with_fewer_tokens_than_patches_go_with_the_tokens_that_their_mask_keeps() -> None:
    """VideoLLaMA 3 omits the tokens of patches that do not change, so tokens are not proportional to the sizes of the
    videos, and each frame is a run: a batch in which not every row has one video was refused."""
    grid, mask = torch.tensor([(2, 2, 4), (2, 2, 2), (1, 2, 4)]), torch.tensor([1, 1, 0, 1, 1, 1, 1, 1]).bool()
    videos = {"pixel_values_videos": NUMBERS[:32], "video_grid_thw": grid, "video_compression_mask": mask}
    read = read_batch(reader(video_token_id=3), {"input_ids": ids_of("ii.i..", "......", "i.i.ii"), **videos})
    assert read.owners == dict(zip(videos, [(16, 0, 16), (1, 0, 2), (4, 0, 4)], strict=True))


def test_a_mask_of_the_rows_is_not_one_of_patches() -> None:
    """Four rows with one, no, one and no images of eight patches each, and a mask of the rows with images."""
    data = {"input_ids": rows_of(2, 0, 2, 0), "pixel_values": NUMBERS[:16], "has_image": torch.arange(4) % 2 == 0}
    read = RowDims(READER).read({**data, "image_grid_thw": torch.tensor([(1, 2, 4)] * 2)})
    assert [part.data["has_image"].tolist() for part in read.split(4)] == [[True], [False]] * 2


def test_a_row_without_placeholder_tokens_has_no_image() -> None:
    """Four rows of LLaVA-NeXT with two adjacent, one, one and no images: each row received one image, and the model
    failed instead of an error that says what to do."""
    data = {"input_ids": ids_of("iiiii.", "ii....", "iii...", "......"), "pixel_values": NUMBERS[:4]}
    with pytest.raises(BatchError, match=r"pixel_values has 4 entries for 4 samples.*pass num_microbatches=1"):
        RowDims(READER).read(data).split(2)
    data["input_ids"] = ids_of("iiiii.", "i.i...", "iii...", "i.....")  # in several runs, but one image each
    assert RowDims(READER).read(data).owners == {}


def test_as_many_runs_of_tokens_as_items_are_one_item_each() -> None:
    """A user trained Qwen2-Audio on clips of fixed lengths, two of one token and one of four: as six tokens are three
    times two, the clips were taken for ones of equal length, and a row received one clip too few."""
    data = {"input_ids": ids_of("i.i...", "iiii.."), "input_features": NUMBERS[:3]}
    assert read_batch(reader(audio_token_id=3), data).owners == {"input_features": (2, 1)}


def test_types_of_tokens_tell_frames_from_images() -> None:
    """GLM-4.5V has one token for images and for the frames of videos: a batch with videos was refused."""
    ids = ids_of("i.ii..", "......", "ii.ii.")
    types = torch.tensor([[1, 0, 2, 2, 0, 0], [0] * 6, [2, 2, 0, 2, 2, 0]])
    images = {"pixel_values": NUMBERS[:4], "image_grid_thw": torch.tensor([(1, 2, 2)])}
    videos = {"pixel_values_videos": NUMBERS[:24], "video_grid_thw": torch.tensor([(1, 2, 4), (2, 2, 4)])}
    data = {"input_ids": ids, "mm_token_type_ids": types, **images, **videos}
    read = read_batch(reader(image_token_id=3, video_token_id=4), data)
    assert read.owners == {
        "pixel_values": (4, 0, 0),
        "image_grid_thw": (1, 0, 0),
        "pixel_values_videos": (8, 0, 16),
        "video_grid_thw": (1, 0, 1),
    }


def test_types_of_the_tokens_around_an_image_are_not_of_the_image() -> None:
    """InternVL's processor also marks the tokens before and after each image (here 7)."""
    ids = torch.tensor([[7, 3, 3, 7, 7, 3, 3, 7], [8, 8, 8, 8, 7, 3, 3, 7]])
    data = {"input_ids": ids, "mm_token_type_ids": ids.ne(8).long(), "pixel_values": NUMBERS[:3]}
    assert read_batch(READER, data).owners == {"pixel_values": (2, 1)}


def test_a_batch_may_have_a_leaf_of_no_images() -> None:
    """A collator passed an empty tensor for three rows of text, next to another input of images, and reading the
    batch failed with ZeroDivisionError."""
    data = {"input_ids": rows_of(0, 0, 0), "pixel_values": torch.zeros(0, 3, 2, 2), "image_ids": torch.ones(5).long()}
    parts = RowDims(READER).read(data).split(3)
    assert all(part.data["pixel_values"] is None for part in parts)
