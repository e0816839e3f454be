"""Images of datasets and requests become content parts with a data URI."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import pickle
from pathlib import Path
from typing import Any

import aiohttp
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from slipstream.config.loading import load_config
from slipstream.config.schema import ConfigError
from slipstream.environments import images
from slipstream.environments.base import Task
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.environments.image_placeholders import place_images
from slipstream.environments.images import decode_data_uri, image_part, image_uri, normal_parts
from slipstream.environments.load import load_environment
from slipstream.environments.openai_api import ChatRequest, RequestError, parse_request
from slipstream.environments.prompts import find_overlong_prompts
from slipstream.environments.text_limits import count_characters
from slipstream.model.images import ImageTokenSpec
from tests.environments.test_endpoint import Served

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def encoded(color: str = "red", kind: str = "PNG", size: tuple[int, int] = (4, 3)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, kind)
    return file.getvalue()


def uri(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


RED, BLUE = encoded("red"), encoded("blue")
RED_PART, BLUE_PART = {"type": "image", "image": uri(RED)}, {"type": "image", "image": uri(BLUE)}
REWARD = {"regex": {"pattern": "x"}}


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def tasks(**options: Any) -> list[Task]:
    """The training tasks of a dataset."""
    options = {"test": 0.0} | ({} if "name" in options else {"reward": REWARD}) | options
    flags = [f"--environment.{name}={v if isinstance(v, str) else json.dumps(v)}" for name, v in options.items()]
    return [*load_environment(load_config(None, ["--model.path=m", *flags]).environment).train]


def jsonl(path: str, *rows: Any) -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def saved(path: str, features: dict[str, Any], *rows: dict[str, Any]) -> None:
    """Write a parquet file with the features of `datasets` in its metadata."""
    made = datasets.Dataset.from_list([*rows], datasets.Features(features))
    pq.write_table(made.with_format("arrow")[:], path)


@pytest.mark.parametrize("kind", images.FORMATS)
def test_every_format_has_its_mime_type(kind: str) -> None:
    data = encoded(kind=kind)
    part = image_part(data, None)
    assert part["image"].startswith(f"data:image/{kind.lower()};base64,")
    assert decode_data_uri(image_uri(part)) == data


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": uri(RED), "detail": "low"}},
        {"type": "image_url", "image_url": uri(RED), "text": None},
        {"type": "image", "image": "red.png"},
        {"type": "image", "image": {"bytes": RED, "path": "nosuch.png"}},
        {"type": "image", "image": {"bytes": None, "path": "red.png"}},
        {"type": "image", "path": "red.png", "text": ""},
        {"type": "image", "url": "red.png", "image": None},
        {"type": "image", "image": RED},
        {"type": "image", "image": f"data:;base64,{base64.encodebytes(RED).decode()}"},
    ],
)
def test_content_parts_of_other_libraries(folder: Path, part: Any) -> None:
    (folder / "red.png").write_bytes(RED)
    assert normal_parts([text("a") | {"image": None}, part], folder) == [text("a"), RED_PART]


def test_placeholders_and_other_content_stay(folder: Path) -> None:
    assert normal_parts([{"type": "image", "text": None}], folder) == [{"type": "image"}]
    assert normal_parts("text", folder) == "text" and normal_parts(None, folder) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"<svg/>", "the image is not an image in the formats PNG, JPEG, WEBP, GIF, BMP, or is damaged"),
        (encoded(kind="TIFF"), "not an image in the formats"),
        (RED[:-20], "or is damaged"),
        ("no.png", "image file 'no.png' is not an image"),
        ("nosuch.png", r"the image file '.*/nosuch.png' can't be read: No such file or directory"),
        (".", "can't be read: Is a directory"),
        ("a\0b", "can't be read: embedded null"),
        ("https://x.org/a.png", "'https://x.org/a.png' is a URL; download it and give a file"),
        ("data:image/png;base64,%%%%", "a data URI is not base64"),
        (uri(b"GIF89a"), "not an image"),
        (7, "an image is 7; give a file, a data URI or bytes"),
        ({"path": None}, "an image is None"),
        (bytes(20_000_001), "the image has 20000001 bytes; the limit is 20000000"),
        (uri(bytes(20_000_001)), "the image has 20000001 bytes; the limit is 20000000"),
        ("big.png", "image file 'big.png' has 20000001 bytes"),
        (f"data:image/png;base64,{'A' * 40_000_001}", "a data URI has 40000001 characters"),
    ],
)  # fmt: skip
def test_what_is_no_image_is_refused(folder: Path, value: Any, message: str) -> None:
    (folder / "no.png").write_bytes(b"text")
    (folder / "big.png").write_bytes(bytes(30_000_000))
    with pytest.raises(ValueError, match=message) as caught:
        image_part(value, folder)
    assert len(str(caught.value)) < 400


def test_an_image_of_too_many_pixels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(size=(100, 100))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4_999)
    with pytest.raises(ValueError, match=r"the image has too many pixels: .*10000 pixels.*limit of 9998"):
        image_part(data, None)


@pytest.mark.parametrize("name", ["red.png", "/etc/passwd", "file:///etc/passwd", "http://x/a.png", "data:image/png,A"])
def test_without_a_folder_only_data_uris_are_read(folder: Path, name: str) -> None:
    (folder / "red.png").write_bytes(RED)
    for value in (name, {"path": name}):
        with pytest.raises(ValueError, match=f"the image is '{name}'; give a data URI"):
            image_part(value, None)
    assert image_part(uri(RED), None) == RED_PART


@pytest.mark.parametrize("image", [None, "red.png", b"x", "http://x/a.png"])
def test_only_a_data_uri_has_bytes(image: Any) -> None:
    with pytest.raises(ValueError, match=r'the "image" of a content part is .*; give a data URI'):
        decode_data_uri(image_uri({"type": "image", "image": image}))


def test_images_fill_placeholders_in_order() -> None:
    hole = {"type": "image"}
    system = {"role": "system", "content": "a <image> is a picture"}
    messages = [system, user([hole, text("<image>")]), user([text("b"), hole])]
    assert place_images(messages, [RED_PART, BLUE_PART]) == [
        system, user([RED_PART, text("<image>")]), user([text("b"), BLUE_PART])
    ]  # fmt: skip
    assert place_images([system, user("<image>a\n<image>")], [RED_PART, BLUE_PART]) == [
        system, user([RED_PART, text("a\n"), BLUE_PART])
    ]  # fmt: skip
    assert place_images([system, user("a"), user("b")], [RED_PART]) == [system, user([RED_PART, text("a")]), user("b")]
    assert place_images([user([text("a"), RED_PART])], [BLUE_PART]) == [user([BLUE_PART, text("a"), RED_PART])]
    assert place_images([user(None)], [RED_PART]) == [user([RED_PART])]
    assert place_images([system, user("a")], []) == [system, user("a")]


@pytest.mark.parametrize("content", ["<image> or <image>?", [{"type": "image"}, text("or"), {"type": "image"}]])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_placeholders_for_another_number_of_images_are_an_error(content: Any, count: int) -> None:
    with pytest.raises(ValueError, match=f"placeholders for images: 2, images: {count}; give as many of both"):
        place_images([user(content)], [RED_PART] * count)


def test_images_need_a_message_of_the_user() -> None:
    with pytest.raises(ValueError, match='images need a message with the role "user"'):
        place_images([{"role": "system", "content": "a"}], [RED_PART])


def test_jsonl_with_paths(folder: Path) -> None:
    (folder / "data" / "pictures").mkdir(parents=True)
    for name, data in ("red", RED), ("blue", BLUE):
        (folder / "data" / "pictures" / f"{name}.png").write_bytes(data)
    rows = [
        {"q": "What?", "files": "pictures/red.png", "more": 1},
        {"q": "<image> or <image>?", "files": ["pictures/red.png", uri(BLUE)], "more": 2},
        {"q": "And?", "files": None, "more": 3},
        {"q": [user([text("a"), {"type": "image"}]), {"role": "assistant", "content": "b"}],
         "files": [str(folder / "data/pictures/blue.png")], "more": 4},
    ]  # fmt: skip
    jsonl("data/train.jsonl", *rows)
    Path("own.py").write_text("def reward(task, completion): return 1.0\n")
    own = {"name": "own.py:reward", "prompt": "q", "images": "files"}
    for dataset in ("data/train.jsonl", "data", "data/*.jsonl"):
        found = tasks(dataset=dataset, **own)
        assert [task.prompt for task in found] == [
            (user([RED_PART, text("What?")]),),
            (user([RED_PART, text(" or "), BLUE_PART, text("?")]),),
            "And?",
            (user([text("a"), BLUE_PART]),),
        ]
        assert [task.data for task in found] == [{"more": number} for number in (1, 2, 3, 4)]
        assert pickle.loads(pickle.dumps(found)) == found and json.dumps([task.prompt for task in found])


def test_paths_are_relative_to_a_directory_that_is_the_dataset(folder: Path) -> None:
    (folder / "data" / "rows").mkdir(parents=True)
    (folder / "data" / "red.png").write_bytes(RED)
    jsonl("data/rows/train.jsonl", {"prompt": "a", "i": "red.png"})
    assert tasks(dataset="data", images="i")[0].prompt == (user([RED_PART, text("a")]),)
    with pytest.raises(ConfigError, match=r"image file '.*data/rows/red.png' can't be read"):
        tasks(dataset="data/rows/train.jsonl", images="i")


def test_templates_and_system_messages() -> None:
    jsonl("d.jsonl", {"q": "<image>What?", "extra": {"picture": uri(RED), "more": 1}})
    [task] = tasks(dataset="d.jsonl", prompt="{q} Think.", images="extra.picture", system="Look.")
    assert task.prompt == ({"role": "system", "content": "Look."}, user([RED_PART, text("What? Think.")]))


def test_without_the_option_a_text_keeps_its_marks() -> None:
    jsonl("d.jsonl", {"prompt": "Is <image> a tag?"})
    assert [task.prompt for task in tasks(dataset="d.jsonl")] == ["Is <image> a tag?"]


@pytest.mark.parametrize("many", [False, True])
def test_parquet_with_a_feature_of_images(monkeypatch: pytest.MonkeyPatch, many: bool) -> None:
    monkeypatch.setattr("slipstream.environments.rows.BATCH_ROWS", 2)
    colors = "red", "blue", "green"
    values = [{"bytes": encoded(color), "path": f"{color}.png"} for color in colors]
    feature = datasets.Image()
    kinds = {"prompt": datasets.Value("string"), "image": [feature] if many else feature, "other": feature}
    rows = [{"prompt": "What?", "image": [v, v] if many else v, "other": {"bytes": b"broken"}} for v in values]
    saved("d.parquet", kinds, *rows)
    parts = [{"type": "image", "image": uri(encoded(color))} for color in colors]
    found = tasks(dataset="d.parquet", images="image")
    assert [t.prompt for t in found] == [(user([*[part] * (1 + many), text("What?")]),) for part in parts]
    assert [t.prompt for t in tasks(dataset="d.parquet")] == ["What?"] * 3
    with pytest.raises(
        ConfigError, match=r"images: d.parquet: it has no column 'img'.*; there are prompt, image, other"
    ):
        tasks(dataset="d.parquet", images="img")


def test_parquet_without_features_of_datasets() -> None:
    table = pa.Table.from_pylist([{"prompt": "What?", "images": [{"bytes": RED, "path": None}]}])
    pq.write_table(table, "d.parquet")
    assert tasks(dataset="d.parquet", images="images")[0].prompt == (user([RED_PART, text("What?")]),)


def test_a_column_of_images_does_not_reach_the_reward() -> None:
    Path("own.py").write_text("def reward(task, completion): return 1.0\n")
    kinds = {name: datasets.Image() for name in ("image", "other")} | {"prompt": datasets.Value("string")}
    kinds["lists"] = datasets.List(datasets.Image()) if hasattr(datasets, "List") else [datasets.Image()]
    value = {"bytes": RED, "path": None}
    saved("d.parquet", kinds, {"prompt": "a", "image": value, "other": value, "lists": [value]})
    for options in ({"images": "image"}, {"images": "lists"}, {}):
        assert tasks(name="own.py:reward", dataset="d.parquet", **options)[0].data == {}


def test_images_inside_of_messages_in_parquet() -> None:
    """The prompt is the only column, and its images are features of `datasets`, two levels deep."""
    part = {"type": datasets.Value("string"), "text": datasets.Value("string"), "image": datasets.Image()}
    kinds = {"prompt": [{"role": datasets.Value("string"), "content": [part]}]}
    image = {"type": "image", "text": None, "image": {"bytes": RED, "path": None}}
    asked = [user([image, text("What?") | {"image": None}]), user([text("a") | {"image": None}] * 2)]
    saved("d.parquet", kinds, {"prompt": asked})
    assert tasks(dataset="d.parquet")[0].prompt == (user([RED_PART, text("What?")]), user("a\na"))


def test_a_saved_dataset_with_images() -> None:
    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
    Path("red.png").write_bytes(RED)
    rows = [{"prompt": "What?", "image": str(Path("red.png").absolute())}]
    datasets.Dataset.from_list(rows, features).save_to_disk("saved")
    assert tasks(dataset="saved", images="image")[0].prompt == (user([RED_PART, text("What?")]),)


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"prompt": "a", "i": "nosuch.png"}, {}, r"d.jsonl, line 2: .* its 'i': the image file '.*nosuch.png' can't"),
        ({"prompt": "a", "i": ["red.png", "d.jsonl"]}, {}, "line 2: .* image 2 of its 'i': image file 'd.jsonl' is"),
        ({"prompt": "a", "i": "http://x/a.png"}, {}, "line 2: .* its 'i': the image 'http://x/a.png' is a URL; downl"),
        ({"prompt": "a"}, {}, "line 2: .* it has no column 'i'"),
        ({"prompt": "<image>", "i": []}, {}, "line 2: .* its 'prompt': placeholders for images: 1, images: 0; give"),
        ({"prompt": [user([{"type": "image"}])]}, {"images": ""},
         "line 2: .* its 'prompt': 1 placeholders for images; set environment.images"),
        ({"prompt": [user([{"type": "image", "image": "http://x/a.png"}])], "i": []}, {}, "its 'prompt': .* is a URL"),
        ({"prompt": [user([{"type": "video", "video": "a.mp4"}])], "i": []}, {}, "content part has type 'video'; give"),
        ({"prompt": [user(["red.png"])], "i": []}, {}, "its 'prompt': a content part is 'red.png'"),
        ({"prompt": [user(3)], "i": []}, {}, "is no text and no list of parts"),
        ({}, {"images": ["i"]}, r"environment.images = \['i'\]: it must be text"),
    ],
)  # fmt: skip
def test_errors_name_line_and_column(folder: Path, row: Any, options: dict[str, Any], message: str) -> None:
    (folder / "red.png").write_bytes(RED)
    jsonl("d.jsonl", {"prompt": "a", "i": None}, row)
    with pytest.raises(ConfigError, match=message) as caught:
        tasks(**({"dataset": "d.jsonl", "images": "i"} | options))
    assert "\n" not in str(caught.value)


def test_missing_pillow_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    jsonl("d.jsonl", {"prompt": "a", "i": None})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^images need Pillow: pip install 'slipstream-rl\[images\]'$"):
        tasks(dataset="d.jsonl", images="i")
    assert tasks(dataset="d.jsonl")


class Recorder:
    """Stands for a `ChatTokenizer` and keeps the messages."""

    @property
    def limits(self) -> Any:
        return self

    def validate_tokens(self, found: str, tokens: int) -> None: ...

    def with_template(self, arguments: Any) -> Recorder:
        return self

    def encode(self, messages: Any, tools: Any = None) -> Any:
        self.messages = messages
        return [1]

    def images(self, messages: Any) -> Any:
        return ()


def requested(content: Any) -> Any:
    """The messages of a chat request that reach the tokenizer."""
    recorder: Any = Recorder()
    parse_request(ChatRequest, json.dumps({"messages": [user(content)]}).encode(), recorder)
    return recorder.messages


def test_the_endpoint_takes_data_uris() -> None:
    part = {"type": "image_url", "image_url": {"url": uri(RED), "detail": "auto"}}
    assert requested([text("a"), part, text("b")]) == [user([text("a"), RED_PART, text("b")])]
    assert requested([text("a"), text("b")]) == [user("a\nb")]


@pytest.mark.parametrize("url", ["red.png", "/etc/passwd", "file:///etc/passwd", "https://x.org/a.png"])
def test_the_endpoint_reads_no_files_and_downloads_nothing(folder: Path, url: str) -> None:
    (folder / "red.png").write_bytes(RED)
    with pytest.raises(RequestError, match=r"image_url.url: Value error, .*; give a data URI") as caught:
        requested([{"type": "image_url", "image_url": {"url": url}}])
    assert caught.value.status == 400


@pytest.mark.parametrize("part", [{"type": "image", "image": uri(RED)}, {"type": "image"}, {"type": "image_url"}])
def test_the_endpoint_refuses_images_in_other_formats(part: Any) -> None:
    with pytest.raises(RequestError):
        requested([part])


async def _answer(content: Any) -> tuple[int, str]:
    async with aiohttp.ClientSession() as client:
        it = Served(client, context=256)
        try:
            url = f"{await it.policy().base_url()}/chat/completions"
            status, answer = await it.post(url, messages=[user(content)])
            return status, answer["error"]["message"]
        finally:
            await it.endpoint.close()
            await it.generator.close()


def test_a_body_may_have_a_large_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image of 19 MB is read if the model reads images, and refused only since it is damaged."""
    monkeypatch.setattr(ChatTokenizer, "image_token_spec", ImageTokenSpec(42, 8, 64, 1024))
    status, message = asyncio.run(_answer([{"type": "image_url", "image_url": {"url": uri(bytes(19_000_000))}}]))
    assert status == 400 and "the image is not an image in the formats" in message and len(message) < 300
    monkeypatch.undo()
    status, _ = asyncio.run(_answer([{"type": "image_url", "image_url": {"url": uri(bytes(19_000_000))}}]))
    assert status == 413


def test_an_image_counts_as_one_character() -> None:
    assert count_characters(RED_PART) == 1
    assert count_characters({"type": "image", "text": "a" * 100}) > 100
    assert count_characters([user([text("abc"), RED_PART])]) == count_characters([user([text("abc")])]) + 2


def test_prompts_with_images_are_tokenized_to_find_their_length() -> None:
    """Few bytes of text may stand for many tokens of images."""

    class Counting:
        limits = type("Limits", (), {"longest_token": 4})
        encoded: list[Any] = []  # noqa: RUF012

        def encode(self, prompt: Any) -> Any:
            self.encoded.append(prompt)
            return [1] * (99 if prompt else 2)

    plain, drawn = (Task("t", (user([*parts, text("aaa")]),)) for parts in ([], [RED_PART]))
    tokenizer: Any = Counting()
    assert find_overlong_prompts([plain, drawn], tokenizer, 60) == {1: "99 tokens"}
    assert tokenizer.encoded == ["", drawn.prompt]
