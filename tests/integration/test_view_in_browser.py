"""The viewer in headless Chromium: click, key, filter, slider, hover, theme; hostile text is not run as markup."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coordexp.data.jsonl import read_jsonl
from coordexp.evaluation.answers import ImageAnswer, ScoredObject, write_answers
from coordexp.printable import printable
from coordexp.records import GTObject
from coordexp.viewer.collect import ViewData, ViewRecord, ViewShape, collect, compare
from coordexp.viewer.render import render
from support.answers import tiny_vocab
from support.browser import CALL_S, Browser, open_browser
from support.scored_answers import answered_again, random_answers, with_soft
from support.view_runs import HOSTILE, hostile_answers, write_run

ROW = '#list [aria-current="true"]'


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as window:
        yield window


def opened(browser: Browser, page: str, folder: Path) -> Browser:
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    browser.problems()  # of the page before
    browser.open(path.as_uri())
    return browser


@pytest.fixture
def run_page(browser: Browser, tmp_path: Path) -> Iterator[Browser]:
    yield opened(browser, render(collect(write_run(tmp_path, steps=4), tiny_vocab())), tmp_path)
    assert browser.problems() == []


@pytest.fixture
def answers_page(browser: Browser, tmp_path: Path) -> Iterator[Browser]:
    answers = random_answers(30, 1)
    answers[3] = replace(answers[3], truncated=True)
    answers[7] = replace(answers[7], repeat_terminated=True)
    write_answers(answers, tmp_path / "predictions.jsonl")
    yield opened(browser, render(collect(tmp_path)), tmp_path)
    assert browser.problems() == []


def test_records_are_listed_and_can_be_clicked(answers_page: Browser) -> None:
    assert answers_page.count("#list button") == 30
    assert answers_page.text("#name") == "s0"
    answers_page.click('#list [data-number="4"]')
    assert answers_page.text("#name") == "s4" and "s4" in answers_page.text(ROW)


def test_every_action_has_a_key(answers_page: Browser) -> None:
    answers_page.press("j", "j", "k", "ArrowDown")
    assert answers_page.text("#name") == "s2"
    answers_page.press("ArrowUp", "ArrowUp", "ArrowUp", "ArrowUp")
    assert answers_page.text("#name") == "s0"
    answers_page.press("?")
    assert answers_page.run("return document.querySelector('#help').hidden") is False
    answers_page.press("/", "s", "1", "7")  # letters typed into the search are not commands
    assert answers_page.text("#name") == "s17" and answers_page.count("#list button") == 1
    answers_page.press("Escape", "g")
    assert answers_page.run("return document.querySelector('#show-gt').checked") is False


def test_soft_objects_are_dashed_and_never_count_as_missed(browser: Browser, tmp_path: Path) -> None:
    answers = with_soft(random_answers(30, 1), 1)
    write_answers(answers, tmp_path / "predictions.jsonl")
    page = opened(browser, render(collect(tmp_path)), tmp_path)
    number = next(n for n, answer in enumerate(answers) if any(o.soft is not None for o in answer.gt or ()))
    page.click(f'#list [data-number="{number}"]')
    soft = sum(o.soft is not None for o in answers[number].gt or ())
    assert page.count(".stage .gt.soft") == soft and f"{soft} soft" in page.text("#badges")
    dash = page.run("return getComputedStyle(document.querySelector('.stage .gt.soft')).strokeDasharray")
    assert dash not in ("", "none") and page.problems() == []


def test_what_covers_a_soft_object_has_no_wrong_name(browser: Browser, tmp_path: Path) -> None:
    boxes = [(0, 0, 500, 500), (600, 0, 999, 99)]
    gt = [ViewShape("cat", "bbox_2d", box, at, soft=(0.5, None)[at]) for at, box in enumerate(boxes)]
    pred = [ViewShape("dog", "bbox_2d", box, at, 1.0, name=f"object_{at}") for at, box in enumerate(boxes)]
    for count, said in ((2, ["1 right box, wrong name"]), (1, [])):
        shapes = tuple(gt[:count]), tuple(pred[:count])
        record = ViewRecord("s", 1, "gone.png", 40, 24, *shapes, True, {}, False, False, "")
        page = opened(browser, render(ViewData("run", (record,))), tmp_path)
        assert page.count(".stage .pred.soft") == 1 and page.problems() == []
        assert re.findall(r"\d+ right box, wrong name", page.text("#badges")) == said


def test_filters_and_orders(answers_page: Browser) -> None:
    answers_page.choose("#filter", "truncated")
    assert (answers_page.count("#list button"), answers_page.text("#name")) == (1, "s3")
    answers_page.choose("#filter", "repeat")
    assert (answers_page.count("#list button"), answers_page.text("#name")) == (1, "s7")
    answers_page.choose("#filter", "missed")
    few = answers_page.count("#list button")
    assert 0 < few < 30 and answers_page.count(".stage .missed") > 0
    answers_page.choose("#order", "missed")
    assert answers_page.count("#list button:first-child[aria-current]") == 1
    counts = answers_page.run(
        "return [...document.querySelectorAll('#list .sub')].map(e => Number(/(\\d+) missed/.exec(e.textContent)[1]))"
    )
    assert counts == sorted(counts, reverse=True)
    assert answers_page.text("#count") == f"{few} of 30 records"
    answers_page.choose("#search", "not in any answer")
    assert answers_page.text("#nothing").startswith("No record is left")
    assert answers_page.run("return document.querySelector('#record').hidden") is True


def test_overlays_can_be_toggled(answers_page: Browser) -> None:
    answers_page.choose("#filter", "missed")

    def visible(css: str) -> int:
        return answers_page.run(
            "return [...document.querySelectorAll(arguments[0])].filter(e => getComputedStyle(e).display !== 'none')"
            ".length", css
        )  # fmt: skip

    before = {css: visible(css) for css in (".gt", ".pred", ".link")}
    assert before[".gt"] > 0
    answers_page.press("g")
    assert (visible(".gt"), visible(".link"), visible(".pred")) == (0, 0, before[".pred"])
    answers_page.press("g", "p")
    assert (visible(".gt"), visible(".pred")) == (before[".gt"], 0)
    answers_page.press("p")
    answers_page.click("#show-links")
    assert (visible(".link"), visible(".pred")) == (0, before[".pred"])


def test_hovering_a_match_shows_its_iou_and_its_partner(run_page: Browser) -> None:
    run_page.hover(".stage .pred.right")
    assert run_page.text("#tip") == "object_1: black cat · matches black cat, IoU 1"
    assert run_page.count(".stage .gt.lit") == 1
    run_page.hover(".stage .gt.missed")
    assert "missed" in run_page.text("#tip") and run_page.count(".stage .lit") == 0
    run_page.hover("#name")
    assert run_page.run("return document.querySelector('#tip').hidden") is True


def test_hovering_a_row_highlights_its_object(run_page: Browser) -> None:
    rows = run_page.run("return [...document.querySelectorAll('.objects tr')].map(e => e.textContent)")
    assert rows == ["object_1black catIoU 1", "–dogmissed"]
    run_page.hover(".objects tr:first-of-type")
    assert run_page.count(".stage .pred.lit") == run_page.count(".stage .gt.lit") == 1
    run_page.hover(".objects tr:last-of-type")
    assert run_page.count(".stage .pred.lit") == 0 and run_page.count(".stage .gt.missed.lit") == 1


def test_tokens_have_roles_and_losses(run_page: Browser) -> None:
    for role in ("MATCHED_COORD", "MATCHED_DESC", "GT_COORD", "GT_STRUCT", "CLOSE", "EOS"):
        assert run_page.count(f"#target .{role}") > 0, role
    assert run_page.count("#rollout .BEHIND_CUT") > 0 and run_page.count("#rollout .GT_COORD") == 0
    colours = run_page.run(
        "return ['MATCHED_COORD', 'GT_COORD', 'GT_DESC'].map(r => "
        "getComputedStyle(document.querySelector('#target .' + r)).backgroundColor)"
    )
    assert len(set(colours)) == 3
    run_page.hover("#target .GT_COORD")
    assert "GT_COORD · loss 0.5 · mean of its role 0.5" in run_page.text("#tip")
    run_page.hover("#target .GT_DESC")
    assert "GT_DESC · no loss" in run_page.text("#tip")
    assert "missing_geometry1" in run_page.text("#facts") and "found: coordinates0.5" in run_page.text("#facts")
    assert "appended" in run_page.run("return document.querySelector('#legend .GT_COORD').title")
    run_page.press("c")
    assert run_page.count("#record.by-loss") == 1
    assert "0.5 nats, the target's worst" in run_page.text("#legend")


def test_forced_tokens_are_dimmed(run_page: Browser) -> None:
    run_page.choose("#colour", "choice")
    opacity = run_page.run(
        "return ['.whole', '.forced'].map(c => getComputedStyle(document.querySelector('#rollout ' + c)).opacity)"
    )
    assert float(opacity[0]) == 1.0 > float(opacity[1])
    forced, tokens = run_page.count("#rollout .forced"), run_page.count("#rollout span")
    assert 0 < forced < tokens and run_page.count("#rollout .whole.forced") == 0
    legend = run_page.text("#legend")
    assert f"decided by the model: {tokens - forced} of {tokens}" in legend and f"forced by JSON: {forced}" in legend
    run_page.press("c")
    assert run_page.count("#record.by-choice") == run_page.count("#record.by-loss") == 0


def test_the_slider_changes_the_step_and_curves_are_drawn(run_page: Browser) -> None:
    assert run_page.count("#list button") == 4 and run_page.text("#step-name") == "all"
    run_page.press("]", "]")
    assert run_page.count("#list button") == 1 and run_page.text("#name") == "sample 1"
    assert run_page.text("#step-name") == "2"  # as logs count: the second step, which answered with global_step 1
    run_page.choose("#step", "4")
    assert run_page.text("#name") == "sample 3" and run_page.text("#step-name") == "4"
    run_page.choose("#step", "0")
    assert run_page.count("#list button") == 4
    assert run_page.count('#curves svg[data-curve="loss"] polyline') == 1
    run_page.hover('#curves svg[data-curve="loss"]')
    assert run_page.text("#tip") in ("loss · step 1: 1", "loss · step 2: 0")
    run_page.choose("#order", "loss")
    assert run_page.text("#name") == "sample 3"
    assert "step 4sample 3 · " in run_page.text("#list button:first-child")  # after the file's name


def test_the_curves_mark_the_records_step(run_page: Browser) -> None:
    """The fixture logs steps 1 and 2: its first record is at the left end, its second at the right; later ones
    have no mark."""
    places = []
    for _ in range(3):
        places.append(run_page.run("return document.querySelector('#curves line.now')?.getAttribute('x1') ?? null"))
        run_page.press("j")
    assert places == ["0", "100", None]


def test_a_page_can_have_curves_only(browser: Browser, tmp_path: Path) -> None:
    history = [{"step": k, "loss": 1.0 / k, "time/pack_s": 0.1 * k} for k in (1, 2, 3)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    page = opened(browser, render(collect(tmp_path)), tmp_path)
    assert "coordexp evaluate" in page.text("#notes") and page.count("#curves figure") == 2
    assert page.text("#curves summary") == "1 further metric"
    assert page.problems() == []


def test_a_threshold_on_scores_hides_predictions(answers_page: Browser) -> None:
    answers_page.choose("#filter", "unmatched")
    before, wrong = answers_page.count("#list button"), answers_page.count("#stages .pred")
    answers_page.choose("#score", "0.99")
    assert answers_page.count("#list button") < before
    answers_page.choose("#filter", "all")
    assert answers_page.count("#stages .pred") < wrong or answers_page.count("#stages .gt.found") == 0
    answers_page.choose("#score", "0")
    answers_page.choose("#filter", "unmatched")
    assert answers_page.count("#list button") == before


def test_a_grid_of_thumbnails_opens_its_records(answers_page: Browser) -> None:
    answers_page.press("v")
    assert answers_page.count("#grid .tile") == 30
    assert answers_page.run("return document.querySelector('#record').hidden") is True
    answers_page.click('#grid [data-number="5"]')
    assert answers_page.text("#name") == "s5"
    assert answers_page.run("return document.querySelector('#grid').hidden") is True


def test_the_picture_can_be_enlarged(run_page: Browser) -> None:
    run_page.click("#stages .stage")
    assert run_page.run("return document.querySelector('#zoom').open") is True
    first = run_page.run("return document.querySelector('#zoomed .stage').clientWidth")
    run_page.press("+", "+")
    assert run_page.run("return document.querySelector('#zoomed .stage').clientWidth") > first
    run_page.press("Escape")
    assert run_page.run("return document.querySelector('#zoom').open") is False


def test_an_address_leads_to_its_record(answers_page: Browser) -> None:
    answers_page.press("j", "j")
    address = answers_page.run("return window.location.href")
    assert address.endswith("#s2")
    answers_page.open("about:blank")
    answers_page.open(address)
    assert answers_page.text("#name") == "s2"
    answers_page.run("window.location.hash = '#s9'")
    assert answers_page.text("#name") == "s9"


def saved_list(page: Browser) -> str:
    page.run(
        "window.saved = null; const make = URL.createObjectURL;"
        "URL.createObjectURL = (blob) => { blob.text().then((text) => { window.saved = text; }); return make(blob); }"
    )
    page.click("#save-list")
    deadline = time.monotonic() + CALL_S
    while (saved := page.run("return window.saved")) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return saved


def test_the_list_is_saved_as_a_dataset(answers_page: Browser) -> None:
    answers_page.choose("#filter", "missed")
    lines = [json.loads(line) for line in saved_list(answers_page).splitlines()]
    assert len(lines) == answers_page.count("#list button")
    assert all(line["objects"] and line["metadata"]["missed"] > 0 for line in lines)
    assert set(lines[0]) == {"images", "width", "height", "objects", "metadata"}


def test_a_saved_list_has_names_as_they_are_and_whole_bins(browser: Browser, tmp_path: Path) -> None:
    pred = (ScoredObject("\u200fחתול", "bbox_2d", (1.25, 2.0, 30.75, 40.5), 0.5),)  # as merged tiles have them
    image = str(tmp_path / "\u200fa.png")
    write_answers([ImageAnswer("a", image, 64, 64, None, pred)], tmp_path / "predictions.jsonl")
    page = opened(browser, render(collect(tmp_path)), tmp_path)
    assert page.text(".objects .desc") == "\\u200fחתול"
    (tmp_path / "saved.jsonl").write_text(saved_list(page), encoding="utf-8")
    (record,) = read_jsonl(tmp_path / "saved.jsonl")
    assert record.objects == (GTObject("\u200fחתול", "bbox_2d", (1, 2, 31, 41)),) and str(record.image) == image


def test_two_runs_next_to_each_other(browser: Browser, tmp_path: Path) -> None:
    answers = random_answers(9, 1)
    for name, run in (("a", answers), ("b", answered_again(answers, 2))):
        write_answers(run, tmp_path / name / "predictions.jsonl")
    page = opened(browser, render(compare(collect(tmp_path / "a"), collect(tmp_path / "b"))), tmp_path)
    assert page.count("#stages .stage") == 2 and page.count(".objects") == 2
    page.hover('.objects[data-run="1"] tr:first-of-type')
    assert page.count('.stage[data-run="1"] .lit') > 0 and page.count('.stage[data-run="0"] .lit') == 0
    page.choose("#filter", "change")
    assert 0 < page.count("#list button") <= 9
    assert page.problems() == []


def test_runs_differ_where_one_found_what_the_other_missed(browser: Browser, tmp_path: Path) -> None:
    """Totals of mistakes were compared, which are equal then, and 0 without annotations."""
    left, right = ((GTObject("cat", "bbox_2d", (x, 0, x + 200, 200))) for x in (0, 500))

    def answer(name: str, gt: tuple[GTObject, ...] | None, *found: GTObject, desc: str = "cat") -> ImageAnswer:
        pred = tuple(ScoredObject(desc, one.kind, one.bins) for one in found)
        return ImageAnswer(name, f"{name}.png", 100, 100, gt, pred)

    both = (left, right)
    runs = {
        "a": [answer("moved", both, left), answer("same", both, left), answer("photo", None, left)],
        "b": [answer("moved", both, right), answer("same", both[::-1], left), answer("photo", None, left, desc="dog")],
    }
    for name, answers in runs.items():
        write_answers(answers, tmp_path / name / "predictions.jsonl")
    page = opened(browser, render(compare(collect(tmp_path / "a"), collect(tmp_path / "b"))), tmp_path)
    page.choose("#filter", "change")
    assert page.run("return [...document.querySelectorAll('#list .who')].map((who) => who.textContent)") == [
        "moved.png", "photo.png",
    ]  # fmt: skip
    page.choose("#search", "dog")  # which the second run alone wrote
    assert page.count("#list button") == 1


def test_curves_of_a_very_long_run_are_drawn(browser: Browser, tmp_path: Path) -> None:
    """Their points were arguments of one call: a browser refused them, and the page showed nothing."""
    lines = [{"step": step, "loss": 2.0 + step % 3} for step in range(1, 200_001)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": lines}))
    page = opened(browser, render(collect(tmp_path)), tmp_path)
    assert page.text("#curves .range") == "steps 1–200000 · 2 … 4" and page.problems() == []


@pytest.mark.parametrize("width", [500, 700, 1000, 1440])
def test_the_page_never_scrolls_sideways(run_page: Browser, width: int) -> None:
    run_page.resize(width)
    seen = run_page.run("const e = document.documentElement; return [innerWidth, e.scrollWidth - e.clientWidth]")
    run_page.resize(1500)
    assert seen == [width, 0]


def test_the_slider_handles_only_its_arrow_keys(run_page: Browser) -> None:
    run_page.run("document.querySelector('#step').focus()")
    run_page.press("ArrowRight")
    assert run_page.text("#step-name") == "1"
    run_page.press("Home")
    assert run_page.text("#step-name") == "all"
    run_page.press("j", "j")
    assert run_page.text("#name") == "sample 2"


def test_light_and_dark_themes(run_page: Browser) -> None:
    def ground() -> str:
        return run_page.run("return getComputedStyle(document.body).backgroundColor")

    first = ground()
    run_page.press("t")
    second = ground()
    run_page.click("#theme")
    assert first != second and ground() == first


def test_hostile_text_is_shown_and_never_executed(browser: Browser, tmp_path: Path) -> None:
    write_answers(hostile_answers(tmp_path), tmp_path / "predictions.jsonl")
    page = opened(browser, render(replace(collect(tmp_path), title=HOSTILE)), tmp_path)
    shown = printable(HOSTILE)  # without the separator of lines that it ends with
    assert page.text("#name") == page.text("#title") == page.text("#rollout") == shown != HOSTILE
    assert page.run("return document.title").startswith("</script>")
    assert shown in page.text("#facts")
    page.hover(".stage polygon")
    assert shown in page.text("#tip")
    assert page.count("img") == 0 and page.count("script") == 3
    assert page.problems() == []


def test_an_added_script_would_not_run(browser: Browser, tmp_path: Path) -> None:
    """The page's policy is the second wall, should text ever become markup."""
    write_answers(random_answers(2, 1), tmp_path / "predictions.jsonl")
    page = opened(browser, render(collect(tmp_path)).replace("</body>", "<script>window.owned = 1</script></body>"),
                  tmp_path)  # fmt: skip
    assert page.run("return window.owned ?? null") is None
    assert any("Content Security Policy" in problem for problem in page.problems())


def test_a_thousand_records_open(browser: Browser, tmp_path: Path) -> None:
    write_answers(random_answers(1000, 4), tmp_path / "predictions.jsonl")
    page = opened(browser, render(collect(tmp_path)), tmp_path)
    assert page.count("#list button") == 1000
    assert page.problems() == []


def test_the_search_worker_of_the_manual_runs_from_a_folder(browser: Browser, tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[2] / "docs/javascripts/iframe-worker.js", tmp_path)
    (tmp_path / "more.js").write_text("self.suffix = ' found';")
    (tmp_path / "worker.js").write_text(
        "addEventListener('message', async (event) => {"
        "if ('IFrameWorker' in parent) { await importScripts('more.js'); postMessage(event.data + self.suffix); } });"
    )
    started = "const worker = new Worker('worker.js'); worker.postMessage('page');"
    result = "window.result = new Promise((done) => worker.addEventListener('message', (event) => done(event.data)));"
    page = f"<body><script src='iframe-worker.js'></script><script>{started}{result}</script></body>"
    assert opened(browser, page, tmp_path).run("return window.result") == "page found"
    assert browser.problems() == []
