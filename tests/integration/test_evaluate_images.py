"""`rolemesh evaluate` asks about rows with images, at a server that keeps what it is asked."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.evaluations import evaluated, rolemesh, rows_beside
from support.sum_server import sum_server
from support.tiny_images import noise, plain, png, write_tiny_image_model

RED, WIDE = png(plain((220, 20, 20))), png(noise(width=112, height=84))

JUDGE = '''
def seen(prompts, completions, images, **rest):
    """As many points as images, whose widths it reads."""
    return [float(sum(one.width for one in row)) for row in images]
'''


def write_suite(folder: Path, rows: list[dict[str, Any]], **images: Any) -> Path:
    """A task of these rows, all held out, whose reward is given what the policy is shown."""
    pictures = folder / "pictures"
    pictures.mkdir()
    (pictures / "red.png").write_bytes(RED)
    (folder / "train.jsonl").write_text(json.dumps({"prompt": "1 + 1", "images": []}))
    (folder / "held.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (folder / "judge.py").write_text(JUDGE)
    data = {
        "type": "jsonl",
        "path": str(folder / "train.jsonl"),
        "held_out_path": str(folder / "held.jsonl"),
        "images": {"folder": str(pictures), **images},
    }
    reward = {"type": "python", "function": f"{folder / 'judge.py'}:seen"}
    path = folder / "suite.yaml"
    path.write_text(yaml.safe_dump({"birds": {"data": data, "reward": reward}}))
    return path


def data_url(picture: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(picture).decode()


def test_a_policy_is_shown_the_images_in_their_places_and_so_is_the_judge(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1 <image> or <image>?", "images": ["red.png", data_url(WIDE)]},
        {"prompt": "2 alone", "images": []},
    ]
    suite = write_suite(tmp_path, rows)
    with sum_server(lambda terms, _: str(terms[0])) as (url, seen):
        code, (told,) = evaluated(tmp_path, "--url", url, "--tasks", str(suite))
    assert code == 0, told
    by_first = {str(body["messages"][0]["content"])[:1]: body["messages"] for body in seen}
    assert by_first["2"] == [{"role": "user", "content": "2 alone"}]
    (turn,) = by_first["["]
    assert turn["content"] == [
        {"type": "text", "text": "1 "},
        {"type": "image_url", "image_url": {"url": data_url(RED)}},
        {"type": "text", "text": " or "},
        {"type": "image_url", "image_url": {"url": data_url(WIDE)}},
        {"type": "text", "text": "?"},
    ]
    shown, alone = rows_beside(tmp_path / told["file"])
    assert (shown["score"], alone["score"]) == (56 + 112, 0)
    assert shown["prompt"] == "user: 1 <image> or <image>?"


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"max_pixels": 56 * 56 - 1}, r"images[0] 'red.png' has 56 x 56 pixels, more than 3135"),
        ({"max_bytes": 20}, "more than 20: make it smaller, or raise data.images.max_bytes"),
    ],
)
def test_an_image_beyond_a_bound_is_told_before_anything_is_asked(
    bounds: dict[str, int], message: str, tmp_path: Path
) -> None:
    suite = write_suite(tmp_path, [{"prompt": "1", "images": ["red.png"]}], **bounds)
    with sum_server(lambda terms, _: "1") as (url, seen):
        done = rolemesh(tmp_path, "evaluate", "--url", url, "--tasks", str(suite))
    assert done.returncode == 2, done.stderr
    assert "task birds: " in done.stderr
    assert "held.jsonl, line 1" in done.stderr
    assert message in done.stderr
    assert seen == []


def test_token_ids_show_no_images_and_are_refused(tmp_path: Path) -> None:
    suite = write_suite(tmp_path, [{"prompt": "1", "images": ["red.png"]}])
    folder = write_tiny_image_model(tmp_path / "model")
    with sum_server(lambda terms, _: "1") as (url, seen):
        asked = ("--url", url, "--tasks", str(suite), "--tokenizer", str(folder))
        done = rolemesh(tmp_path, "evaluate", *asked)
    assert done.returncode == 2, done.stderr
    assert "task birds: its data has images, and prompts are sent as token ids" in done.stderr
    assert seen == []
