"""Step times that were composed are never shown as measured ones, in any output."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from bundle import bundle, fitted
from plan_builders import scenario, small_plan

import windtunnel as wt
from windtunnel.cli.main import main
from windtunnel.reports.context import ReportContext
from windtunnel.reports.page import evidence_badge
from windtunnel.scenarios.load import Override, load_scenario
from windtunnel.scenarios.resolve import Resolved, resolve
from windtunnel.sim.cost import evidence
from windtunnel.sim.cost.bundled import bundled_profiles
from windtunnel.sim.cost.constant import ConstantCost
from windtunnel.sim.cost.profile import load_profile, save_profile

NAME = "llama-3.1-8b-h100-sxm-tp1-bf16"
DEPLOYMENT = {"model": "llama-3.1-8b", "gpu": "h100"}
SMALL: dict[str, Any] = {
    **DEPLOYMENT,
    "max_model_len": 2048,
    "num_requests": 20,
    "input": 100,
    "output": 8,
    "request_rate": 20,
    "saturation": False,
}
TABLE: dict[str, Any] = {
    "name": "small",
    "deployment": DEPLOYMENT,
    "engine": {"max_model_len": 2048},
    "workload": {"num_requests": 20, "input": 100, "output": 8, "request_rate": 20},
}
WORDS = {"measured": "measured", "composed": "composed, not measured", "uncalibrated": "uncalibrated"}
BADGE = re.compile(r'<span class="badge (measured|composed|uncalibrated)">([^<]*)</span>')
STATED = re.compile(r'<div class="stated ([^"]*)"')


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in; the only bundled profile, NAME, is a composed one."""
    monkeypatch.chdir(tmp_path)
    bundle(tmp_path, monkeypatch, [(NAME, fitted())])
    return tmp_path


def saved(source: str | None = "composed", **origin: Any) -> str:
    save_profile(fitted(source=source, statement=None, **origin), "mine.json")
    return "mine.json"


def resolved(**settings: Any) -> Resolved:
    given = {**SMALL, **settings}
    return resolve(load_scenario(None, {key: Override(value, f"{key}=") for key, value in given.items()}))


def shows(page: str, grade: str) -> bool:
    """Whether the page's badges of step times are all of that grade, and there is one."""
    return set(BADGE.findall(page)) == {(grade, WORDS[grade])} and set(STATED.findall(page)) <= {grade}


# -- the grade


@pytest.mark.parametrize("name", [each.name for each in bundled_profiles()])
def test_a_bundled_profile_is_composed_where_its_provenance_says_so_and_the_index_says_the_same(name: str) -> None:
    from windtunnel.sim.cost import bundled

    path = Path(bundled.__file__).with_name("profiles")
    (entry,) = (each for each in json.loads((path / "index.json").read_text())["profiles"] if each["name"] == name)
    described = load_profile(path / f"{name}.json").describe()
    grade = evidence.evidence_of(described)
    assert grade == evidence.evidence_of_provenance({"source": entry["source"]})
    assert (grade == "composed") == ("not measured end to end" in described["provenance"]["statement"])
    assert (grade == "measured") == (described["provenance"].get("num_steps", 0) > 0)


@pytest.mark.parametrize(
    ("source", "grade"),
    [
        *[("measured", "measured"), ("recorded", "measured"), (None, "measured"), ("steps.csv", "measured")],
        *[("composed", "composed"), ("transferred", "composed")],
    ],
)
def test_the_source_of_a_profile_decides(source: str | None, grade: str) -> None:
    assert evidence.evidence_of(fitted(source=source).describe()) == grade


def test_what_is_not_fitted_is_uncalibrated() -> None:
    assert evidence.evidence_of(ConstantCost(step_s=0.01).describe()) == "uncalibrated"
    assert resolved(cost="roofline").evidence == "uncalibrated"
    assert evidence.evidence_of({}) == "uncalibrated"


@pytest.mark.parametrize(
    ("settings", "grade"),
    [({}, "measured"), ({"gpu": "l40s"}, "composed"), ({"pipeline_parallel_size": 2}, "composed")],
)
def test_a_measured_profile_is_no_measurement_of_another_card_or_of_a_pipeline(
    settings: Mapping[str, Any], grade: str
) -> None:
    answer = resolved(profile=saved("measured"), **settings)
    assert answer.evidence == grade
    told = " ".join(answer.notes)
    assert ("carried over to another deployment" in told) == (grade == "composed")


def test_the_weakest_counts_for_several() -> None:
    assert evidence.weakest(["measured", "composed"]) == "composed"
    assert evidence.weakest(["composed", "uncalibrated", "measured"]) == "uncalibrated"
    assert evidence.weakest(["measured"]) == "measured"
    assert evidence.weakest([]) == "uncalibrated"


def test_pools_of_a_fleet_are_told_by_the_weakest() -> None:
    real = {"replicas": 1, "cost": {"kind": "profile", "path": saved("measured")}}
    table = {**TABLE, "fleet": {"pools": {"real": real, "other": {"replicas": 1}}}}
    answer = resolve(load_scenario(table, {}))
    assert [each["cost_model_evidence"] for each in answer.describe()["fleet"]["pools"].values()] == [
        "measured",
        "composed",
    ]
    assert answer.describe()["metadata"]["cost_model_evidence"] == "composed"


def test_a_run_that_was_saved_without_it_is_told_by_its_cost_model() -> None:
    described = resolved().describe()
    del described["metadata"]["cost_model_evidence"]
    assert evidence.evidence_of_run(described) == "composed"
    assert evidence.evidence_of_summary({"cost_model_calibrated": True}) == "composed"
    assert evidence.evidence_of_summary({"cost_model_calibrated": False}) == "uncalibrated"


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match="evidence must be one of measured, composed, uncalibrated, got 'good'"):
        ReportContext(evidence="good")


def test_badges_differ_in_words_and_in_their_style() -> None:
    made = [evidence_badge(grade) for grade in evidence.GRADES]
    assert [BADGE.findall(each) for each in made] == [[(grade, WORDS[grade])] for grade in evidence.GRADES]
    style = (Path(wt.__file__).parent / "reports" / "page.css").read_text()
    filled = [re.findall(rf"\.badge\.{grade} {{[^}}]*--filled: (\d+)%", style) for grade in evidence.GRADES]
    assert filled == [["100"], ["50"], ["0"]]


# -- every output


@pytest.mark.parametrize(
    ("profile", "grade"),
    [(None, "composed"), ("composed", "composed"), ("transferred", "composed"), ("measured", "measured")],
)
def test_a_run_says_what_stands_behind_its_step_times(
    profile: str | None, grade: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {} if profile is None else {"profile": saved(profile)}
    run = wt.simulate(None, **{**SMALL, **own})
    run.report(folder / "report.html")
    run.save(folder / "run")
    assert shows((folder / "report.html").read_text(), grade)
    name = NAME if profile is None else "mine.json"
    assert f"Cost model: profile {name}, {WORDS[grade]}\n" in run.text()
    assert f"cost model profile {name}, {WORDS[grade]};" in run.markdown()
    assert run.summary["cost_model_evidence"] == grade
    assert wt.load_run(folder / "run").context.evidence == grade
    flags = () if profile is None else ("--profile", "mine.json")
    plain = ("--model", "llama-3.1-8b", "--gpu", "h100", "--num-prompts", "5", *flags)
    plain = (*plain, "--input-len", "100", "--output-len", "8", "--no-saturation")
    assert main(["simulate", *plain, "--dry-run"]) == 0
    assert f"cost model: profile {name} ({WORDS[grade]})\n" in capsys.readouterr().out


def test_the_roofline_is_uncalibrated_in_a_report(folder: Path) -> None:
    wt.simulate(None, **SMALL, cost="roofline").report(folder / "report.html")
    assert shows((folder / "report.html").read_text(), "uncalibrated")


def test_a_comparison_is_told_by_its_weakest_run_and_that_they_differ(folder: Path) -> None:
    alike = wt.compare(TABLE, {"few": {"max_num_seqs": 2}, "many": {}})
    alike.report(folder / "alike.html")
    assert shows((folder / "alike.html").read_text(), "composed")
    assert alike.to_dict()["cost_model_evidence"] == "composed"
    assert "different evidence" not in alike.text()
    other = wt.compare(TABLE, {"bundled": {}, "mine": {"profile": saved("measured")}})
    other.report(folder / "other.html")
    assert shows((folder / "other.html").read_text(), "composed")
    text = " ".join(other.text().split())
    assert "Step times rest on different evidence (measured; composed, not measured), so that a part of" in text
    assert "cost = roofline" not in text
    assert re.search(r"cost model .*, composed, not measured\.\n", other.markdown())


def test_a_sweep_says_it(folder: Path) -> None:
    swept = wt.sweep(TABLE, {"max_num_seqs": [2, 8]}, jobs=1, reps=1)
    swept.report(folder / "sweep.html")
    assert shows((folder / "sweep.html").read_text(), "composed")
    assert swept.to_dict()["cost_model"]["evidence"] == "composed"
    assert f"cost model profile {NAME}, composed, not measured" in swept.markdown()
    cards = wt.sweep(TABLE, {"gpu": ["h100", "l40s"]}, jobs=1, reps=1)
    assert "different evidence (composed, not measured; uncalibrated)" in " ".join(cards.text().split())


def test_an_optimisation_says_it(folder: Path) -> None:
    table = {**TABLE, "slo": {"objectives": ["ttft:p90<500ms"]}}
    found = wt.optimize(table, {"max_num_seqs": [2, 8]}, jobs=1, reps=2)
    found.report(folder / "optimize.html")
    assert shows((folder / "optimize.html").read_text(), "composed")
    assert found.to_dict()["cost_model"]["evidence"] == "composed"
    assert f"cost model profile {NAME}, composed, not measured" in found.markdown()


def test_a_capacity_says_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        *('name = "small"', "[deployment]", 'model = "llama-3.1-8b"', 'gpu = "h100"', "[engine]"),
        *("max_num_seqs = 4", "max_model_len = 2048", "[workload]", "input = 100", "output = 8", "request_rate = 20.0"),
        *("[slo]", 'objectives = ["ttft:p90<60ms"]'),
    ]
    Path("small.toml").write_text("\n".join(lines))
    quick = ("--num-requests", "100", "--reps", "4", "--precision", "0.5", "-j", "1", "-q")
    main(["capacity", "small.toml", *quick, "--html", "capacity.html"])
    assert shows(Path("capacity.html").read_text(), "composed")
    assert "composed from kernel tables, not measured end to end" in " ".join(capsys.readouterr().out.split())


def test_a_plan_says_it_of_the_recommended_deployment_and_of_each_candidate(folder: Path) -> None:
    table = scenario(workload={"request_rate": 20, "num_requests": 100})
    del table["cost"]
    found = small_plan(table, gpus={"h100-sxm": 2.5, "h100-nvl": 9.0}, uncalibrated=True, replications=1)
    assert found.recommended is not None
    assert found.recommended["evidence"] == "composed"
    assert {each["gpu"]: each["evidence"] for each in found.told["candidates"]} == {
        "H100-SXM": "composed",
        "H100-NVL": "uncalibrated",
    }
    found.report(folder / "plan.html")
    assert shows((folder / "plan.html").read_text(), "composed")
    for text in (found.text(), found.markdown()):
        assert re.search(r"H100-SXM \(TP 1\), composed, not measured\b", text)
        assert re.search(r"H100-NVL \(TP 1\), uncalibrated\b", text)


def test_profiles_are_listed_and_shown_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert wt.profiles().evidence.tolist() == ["composed"]
    saved("measured")
    for arguments, grade in ((("list",), "composed"), (("list", "--dir", "."), "measured")):
        assert main(["profiles", *arguments, "--json"]) == 0
        rows = {row["name"]: row["evidence"] for row in json.loads(capsys.readouterr().out)}
        assert rows[NAME if grade == "composed" else "mine.json"] == grade
    assert main(["profiles", "list"]) == 0
    heads, row = (line.split() for line in capsys.readouterr().out.splitlines())
    assert heads.index("evidence") - 1 == row.index("composed")  # "kv cache" is one heading
    assert main(["profiles", "show", NAME]) == 0
    assert re.search(r"^ +evidence +composed, not measured$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("grade", evidence.GRADES)
def test_the_page_says_it(grade: str) -> None:
    from windtunnel.ui.shown import cost_told

    own = {"cost": "roofline"} if grade == "uncalibrated" else {"profile": saved(grade)}
    told = cost_told(resolved(**own))
    assert told["evidence"] == grade
    assert told["badge"].split(";")[0] == WORDS[grade]
