"""The report: one valid page for any run folder, self-contained, escaped, with everything that the run holds."""

import base64
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from fewstep.observe.metrics import Row
from fewstep.observe.report import write_report
from fewstep.observe.report.contents import MAX_GRIDS, read_contents, spread
from fewstep.observe.report.images import MAX_BYTES, load_image
from fewstep.observe.sinks import JsonlSink

RECIPE = """name: tiny-student   # a comment that stays
seed: 7
iterations: 12
method: {name: dmd2}
teacher: {init: runs/tiny-teacher}
data: {name: fashion_mnist, batch: 5}
sampling: {steps: 4}
validation: {samples: 200}
"""
VOID = {"meta", "img", "br", "link", "input", "hr", "line", "circle"}


class Page(HTMLParser):
    """A page that was read with every tag closed in order; ``tags`` and their attributes, and the text by tag."""

    def __init__(self, path: Path):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert self.open == [], "tags that were never closed"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> in the wrong place"

    def handle_data(self, data):
        if self.open:
            self.text[self.open[-1]] = self.text.get(self.open[-1], "") + data

    @property
    def words(self) -> str:
        return " ".join(text for tag, text in self.text.items() if tag not in ("style", "script"))

    def attributes(self, tag: str, name: str) -> list[str]:
        return [attributes[name] or "" for found, attributes in self.tags if found == tag and name in attributes]

    @property
    def sections(self) -> list[str]:
        return self.attributes("section", "id")


def picture(path: Path, shade: int = 0, size: tuple[int, int] = (24, 16)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade, 100, 200)).save(path)


def write_rows(folder: Path, *rows: Row) -> None:
    sink = JsonlSink(folder / "metrics.jsonl")
    for row in rows:
        sink.write(row)
    sink.close()


def full_run(folder: Path) -> Path:
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "environment.json").write_text(
        json.dumps({"torch": "2.13.0", "device": {"name": "cpu", "cores": [2, 3]}})
    )
    entry = {"num_steps": 4, "network_calls": 4, "accuracy": 0.93, "ms_per_image": 1.4, "num_samples": 1000}
    rows = [
        {"name": "teacher", **entry, "frechet": 7.42},
        {"name": "student", **entry, "frechet": 3.0625, "recall": None},
    ]
    (folder / "evaluation.json").write_text(json.dumps(rows))
    for iteration in (4, 8, 12):
        picture(folder / f"samples/iteration-{iteration:06d}.steps4.png", iteration)
    picture(folder / "samples/compare.png", 200)
    train = [
        Row(
            "train",
            iteration,
            0.5 * iteration,
            {
                "critic/loss": 1.0 / iteration,
                "critic/lr": 4e-4,
                "critic/updates": 5.0 * iteration,
                "student/loss": -0.25,
                "student/dmd_rms": 0.5,
                "student/grad_norm": math.nan if iteration == 6 else 2.0,
                "latents/mean.stop0": 0.1,
                "latents/std.stop0": 0.8,
                "latents/mean.stop3": 0.1,
                "latents/std.stop3": 0.9,
                "samples_per_s": 812.0,
                "phase/critic.0": 3.0,
            },
        )
        for iteration in range(2, 13, 2)
    ]
    validation = [
        Row(
            "validation",
            iteration,
            0.5 * iteration,
            {"validation/frechet.steps4": value, "validation/frechet.steps1": 9.0},
        )
        for iteration, value in [(4, 8.0), (8, 2.375), (12, 2.5)]
    ]
    events = [
        Row("warning", 8, 4.0, message="The latents drift."),
        Row("event", 12, 6.0, message="Checkpoint written."),
    ]
    write_rows(folder, *train, *validation, *events)
    return write_report(folder)


def test_a_full_run_shows_everything_it_holds(tmp_path):
    page = Page(full_run(tmp_path))
    assert page.sections == [
        "warnings",
        "quality",
        "comparison",
        "samples",
        "curves",
        "latents",
        "speed",
        "events",
        "recipe",
        "environment",
    ]
    assert page.text["h1"] == "tiny-student"
    assert page.text["pre"] == RECIPE
    for words in (
        "A 4-step student, distilled from the teacher runs/tiny-teacher.",
        "finished",
        "60 updates",
        "The latents drift.",
        "Checkpoint written.",
        "7.42",
        "2, 3",
        "Iteration 8",
        "Of this loss only the gradient means something",
    ):
        assert words in page.words
    charts = page.attributes("svg", "aria-label")
    assert charts[0] == "Frechet distance"
    assert charts.count("loss") == 2
    assert len(charts) == 10


def test_the_figures_at_the_top_are_those_of_the_run(tmp_path):
    source = full_run(tmp_path).read_text()
    tiles = dict(re.findall(r'class="what">([^<]*)</p><p class="value">([^<]*)<', source))
    assert tiles == {
        "Iterations": "12",
        "Training time": "6 s",
        "Throughput": "812",
        "Best Frechet distance": "2.375",
        "Warnings": "1",
    }
    assert "4 steps, iteration 8; last 2.5. Validation on 200 samples shows a tendency only" in source


def test_quality_is_drawn_over_the_seconds_of_training(tmp_path):
    page = Page(full_run(tmp_path))
    (frechet,) = [
        found["data-lines"] for tag, found in page.tags if tag == "svg" and found["aria-label"] == "Frechet distance"
    ]
    one, four = json.loads(frechet or "")
    assert (one["label"], four["label"]) == ("1 step", "4 steps")
    assert [point[2:] for point in four["points"]] == [["2 s", "8"], ["4 s", "2.375"], ["6 s", "2.5"]]
    first, second, third = (point[0] for point in four["points"])
    assert second - first == pytest.approx(third - second, abs=0.2)


def test_the_page_needs_no_outside_resource(tmp_path):
    path = full_run(tmp_path)
    page = Page(path)
    assert not re.search(r"https?://|//[a-z]+\.|@import|url\(", page.source)
    for tag, attributes in page.tags:
        for name in ("src", "href", "data", "action", "poster", "srcset", "xlink:href"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:image/")), (tag, name, value)
    assert "default-src 'none'" in page.attributes("meta", "content")[0]


def test_pictures_are_inside_the_page_byte_for_byte(tmp_path):
    sources = Page(full_run(tmp_path)).attributes("img", "src")
    inside = [base64.b64decode(source.removeprefix("data:image/png;base64,")) for source in sources]
    names = ["compare.png", *(f"iteration-{iteration:06d}.steps4.png" for iteration in (4, 8, 12))]
    assert inside == [(tmp_path / "samples" / name).read_bytes() for name in names]


def test_at_most_a_dozen_grids_are_shown_spread_from_the_first_to_the_last(tmp_path):
    for num_steps in (1, 4, 20):
        for iteration in range(3, 100, 3):
            picture(tmp_path / f"samples/iteration-{iteration:06d}.steps{num_steps}.png")
    grids = read_contents(tmp_path).grids
    assert len(grids) == MAX_GRIDS == 12
    for num_steps in (1, 4, 20):
        assert [grid.iteration for grid in grids if grid.num_steps == num_steps] == [3, 36, 66, 99]
    assert len(Page(write_report(tmp_path)).attributes("img", "src")) == 12


def test_spreading_keeps_both_ends():
    assert spread(range(5), 7) == [0, 1, 2, 3, 4]
    assert spread(range(100), 4) == [0, 33, 66, 99]
    assert spread(range(9), 1) == [8]


@pytest.mark.parametrize(
    "hostile", ['<script>alert("x")</script>', "\"><img src=x onerror='alert(1)'>", "</pre></svg>&amp;"]
)
def test_names_from_outside_are_only_text(tmp_path, hostile):
    (tmp_path / "recipe.yaml").write_text(f"name: {json.dumps(hostile)}\nteacher: {{init: {json.dumps(hostile)}}}\n")
    (tmp_path / "environment.json").write_text(json.dumps({hostile: hostile, "more": {hostile: [hostile]}}))
    (tmp_path / "evaluation.json").write_text(json.dumps([{"name": hostile, hostile: hostile, "frechet": hostile}]))
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples/iteration-1.steps1.png").write_text(hostile)
    values = {f"{hostile}/{hostile}.{hostile}": 1.0, f"student/{hostile}": 2.0, f"latents/std.{hostile}": 3.0}
    write_rows(
        tmp_path,
        Row("train", 1, 0.0, values),
        Row("validation", 1, 0.0, {f"validation/frechet.{hostile}": 1.0}),
        Row("warning", 1, 0.0, message=hostile),
        Row("event", 1, 0.0, message=hostile),
    )
    page = Page(write_report(tmp_path))
    assert page.text["h1"] == hostile
    assert page.words.count(hostile) >= 8
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    assert page.attributes("img", "src") == []
    assert all(not name.startswith("on") for _, attributes in page.tags for name in attributes)


def test_lines_written_by_anybody_give_a_page_of_text(tmp_path):
    lines = [
        '{"kind": "warning", "iteration": 1, "time_s": 0, "message": 5}',
        '{"kind": "event", "iteration": 1, "time_s": 0, "message": {"<script>": "\\ud800"}}',
        '{"kind": "train", "iteration": 1, "time_s": 0, "<script>\\ud800": 1.0, "student/<b>.<i>": "Infinity"}',
        '{"kind": "train", "iteration": Infinity, "time_s": 0}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "recipe.yaml").write_text("day: 2024-99-99\n")
    page = Page(write_report(tmp_path))
    assert sum(tag in ("script", "i") for tag, _ in page.tags) == page.source.count("<i></i>") + 1
    assert page.words.count("<script>") >= 2
    assert "line 4: not a row of metrics" in page.words
    assert "recipe.yaml is not valid YAML" in page.words


def test_an_empty_folder_gives_a_page(tmp_path):
    page = Page(write_report(tmp_path))
    assert page.text["h1"] == tmp_path.name
    assert page.sections == []


def test_a_run_after_its_first_row_gives_a_page_that_calls_it_unfinished(tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    write_rows(tmp_path, Row("train", 5, 0.25, {"critic/loss": 1.0}))
    page = Page(write_report(tmp_path))
    assert page.sections == ["curves", "recipe"]
    assert "of 12; not finished" in page.words


def test_damaged_files_are_named_and_the_rest_is_shown(tmp_path):
    full_run(tmp_path)
    (tmp_path / "evaluation.json").write_text("[{")
    (tmp_path / "recipe.yaml").write_text("name: [never closed")
    torn = tmp_path / "samples/iteration-000008.steps4.png"
    torn.write_bytes(torn.read_bytes()[:60])
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_bytes(b"{broken\n" + metrics.read_bytes())
    page = Page(write_report(tmp_path))
    for name in ("evaluation.json", "recipe.yaml", "iteration-000008.steps4.png", "line 1"):
        assert name in page.text["span"]
    assert len(page.attributes("img", "src")) == 3
    assert page.text["pre"] == "name: [never closed"
    assert "curves" in page.sections


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such run folder"):
        write_report(tmp_path / "absent")


def test_a_huge_picture_is_scaled_down(tmp_path):
    path = tmp_path / "noise.png"
    Image.effect_noise((2400, 1000), 90).save(path)
    assert path.stat().st_size > MAX_BYTES
    image = load_image(path)
    assert image.source.startswith("data:image/jpeg;base64,")
    assert len(image.source) < path.stat().st_size
    assert (image.width, image.height) == (2400, 1000)


def test_the_best_of_each_column_is_marked_unless_all_are_equal(tmp_path):
    rows = [
        {"name": "teacher", "num_steps": 1, "frechet": 40.0, "accuracy": 0.5, "recall": 0.7},
        {"name": "student", "num_steps": 1, "frechet": 10.0, "accuracy": 0.25, "recall": 0.7},
        {"name": "broken", "num_steps": 1, "frechet": math.nan, "accuracy": None, "recall": 0.7},
    ]
    (tmp_path / "evaluation.json").write_text(json.dumps(rows))
    source = write_report(tmp_path).read_text()
    assert re.findall(r'class="best[^>]*>([^<]*)<', source) == ["0.5", "10"]
    assert re.findall(r"--share: ([^%]*)%", source) == ["100.0", "25.0"]
    assert source.count('<tr class="student">') == 1


def test_real_data_have_no_steps_and_are_never_the_best(tmp_path):
    rows = [
        {"name": "real data", "num_steps": 0, "network_calls": 0.0, "frechet": 0.5, "accuracy": 0.9},
        {"name": "teacher", "num_steps": 20, "network_calls": 20.0, "frechet": 40.0, "accuracy": 0.5},
        {"name": "student", "num_steps": 4, "network_calls": 4.0, "frechet": 0.5, "accuracy": 0.25},
    ]
    (tmp_path / "evaluation.json").write_text(json.dumps(rows))
    source = write_report(tmp_path).read_text()
    assert "<th>real data</th><td></td><td></td><td" in source
    assert re.findall(r'class="best[^>]*>([^<]*)<', source) == ["0.5", "0.5"]
    assert '<td class="best">0.5</td>' in source.split("<th>teacher</th>")[1].split("</tr>")[0]
    assert "best" not in source.split("<th>real data</th>")[1].split("</tr>")[0]


def test_the_report_is_replaced_in_one_step(tmp_path):
    path = write_report(tmp_path)
    path.write_text("old")
    write_report(tmp_path)
    assert path.read_text().startswith("<!doctype html>")
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]
