"""``windtunnel profiles``: list, show and diff."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bundle import COMPOSED, GPU, MODEL, RESTS_ON, bundle, fitted

from windtunnel.cli.main import main
from windtunnel.cli.profiles import EXAMPLES, GRID
from windtunnel.sim.cost.constant import ConstantCost
from windtunnel.sim.cost.fitted import FittedCost
from windtunnel.sim.cost.profile import save_profile

ONE, TWO, OTHER = "llama-h100-tp1", "llama-h100-tp2", "qwen-l40s-tp1"


@pytest.fixture
def bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, FittedCost]:
    """Three bundled profiles; the working folder is another, empty one."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    profiles = {
        ONE: fitted(),
        TWO: fitted(base_s=3e-3, tensor_parallel_size=2),
        OTHER: fitted(base_s=9e-3, model="Qwen/Qwen2.5-7B-Instruct", gpu="L40S", stated_error={}),
    }
    bundle(tmp_path, monkeypatch, profiles.items())
    return profiles


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["profiles", *arguments]) == 0
    return capsys.readouterr().out


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return json.loads(answer(capsys, "list", *arguments, "--json"))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["profiles", *arguments])
    captured = capsys.readouterr()
    assert captured.out == ""
    return code, captured.err


# -- list


def test_the_list_shows_each_profile_with_its_case_and_error(
    bundled: dict[str, FittedCost], capsys: pytest.CaptureFixture[str]
) -> None:
    head, *lines = answer(capsys, "list").splitlines()
    assert head.split("  ")[0] == "name"
    assert [line.split()[0] for line in lines] == [ONE, TWO, OTHER]
    assert lines[0].split()[1:] == [
        MODEL,
        GPU,
        "1",
        "bfloat16",
        "auto",
        "composed",
        *3 * ["1,000,000,000"],
        "4.2",
        "%",
        "11.3",
        "%",
    ]
    assert lines[2].split()[-4:] == ["not", "known", "not", "known"]


def test_the_list_shows_how_large_steps_may_be(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save_profile(fitted(largest=1100), tmp_path / "small.json")
    save_profile(ConstantCost(step_s=0.01), tmp_path / "flat.json")
    head, flat, small = answer(capsys, "list", "--dir", str(tmp_path)).splitlines()
    assert [head.split().index(name) for name in ("decodes", "context", "tokens")] == [8, 9, 10]
    assert small.split()[-7:-4] == ["1,100"] * 3
    assert flat.split()[-5:] == ["-"] * 5
    (_, row) = listed(capsys, "--dir", str(tmp_path))
    assert row["largest_steps"] == {"num_decode_seqs": 1100, "decode_context_tokens": 1100, "num_tokens": 1100}


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ((), [ONE, TWO, OTHER]),
        (("--model", "llama-3.1-8b"), [ONE, TWO]),
        (("--gpu", "h100", "--tp", "2"), [TWO]),
        (("--tensor-parallel-size", "1"), [ONE, OTHER]),
        (("--gpu", "L40S"), [OTHER]),
        (("--model", "no-such-model"), []),
    ],
)
def test_the_list_is_filtered_by_any_name_of_a_model_and_gpu(
    bundled: dict[str, FittedCost], capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], names: list[str]
) -> None:
    assert [row["name"] for row in listed(capsys, *flags)] == names


def test_the_json_of_the_list_holds_what_the_profile_states(
    bundled: dict[str, FittedCost], capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = listed(capsys, "--tp", "2")
    assert (row["model"], row["gpu"], row["statement"]) == (MODEL, GPU, COMPOSED)
    assert (row["p50_percent"], row["p90_percent"], row["rests_on"]) == (4.2, 11.3, RESTS_ON)
    assert row["checksum"].startswith("sha256:")


def test_a_folder_is_listed_and_what_is_no_profile_in_it_is_named(
    bundled: dict[str, FittedCost], capsys: pytest.CaptureFixture[str]
) -> None:
    save_profile(fitted(), "b.json")
    save_profile(ConstantCost(step_s=0.01), "a.json")
    Path("c.json").write_text("{}")
    Path("notes.txt").write_text("no profile")
    assert main(["profiles", "list", "--dir", ".", "--json"]) == 0
    captured = capsys.readouterr()
    assert [row["name"] for row in json.loads(captured.out)] == ["a.json", "b.json"]
    assert [row["kind"] for row in json.loads(captured.out)] == ["constant", "fitted"]
    assert "warning: left out: c.json: the profile lacks schema_version" in captured.err
    assert [row["name"] for row in listed(capsys, "--dir", ".", "--gpu", "h100")] == ["b.json"]
    assert "constant, uncalibrated" in answer(capsys, "list", "--dir", ".")


def test_nothing_found_is_said(bundled: dict[str, FittedCost], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profiles", "list", "--tp", "8"]) == 0
    assert capsys.readouterr() == ("", "none of 3 profiles is like that\n")
    assert main(["profiles", "list", "--dir", "."]) == 0
    assert capsys.readouterr() == ("", "no profile in .\n")


# -- show


def test_show_tells_origin_error_domain_and_example_times(
    bundled: dict[str, FittedCost], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = answer(capsys, "show", ONE)
    flat = " ".join(shown.split())
    for expected in (
        f"statement {COMPOSED}",
        f"stated error median 4.2 %, nine of ten within 11.3 %, against {RESTS_ON}",
        f"model {MODEL}",
        "checksum sha256:",
        "all 400 80 1.2 % 3.5 % 9.0 % 1.5 % -0.1 % 91.0 %",
        "decode 16,384 10.0 % -20.0 % to +20.0 % 100",
        "num_decode_seqs 0 to 1,000,000,000",
    ):
        assert expected in flat
    cost = bundled[ONE]
    for step in EXAMPLES:
        assert f"{step.what} {1e3 * cost.step_time_s(step.shape):.2f} ms nine of ten" in flat


def test_show_marks_steps_that_are_outside_of_what_was_measured(
    bundled: dict[str, FittedCost], capsys: pytest.CaptureFixture[str]
) -> None:
    save_profile(fitted(largest=1100), "small.json")
    lines = {line.split("  ")[1]: line for line in answer(capsys, "show", "small.json").splitlines() if " ms" in line}
    assert "outside of what was measured" not in lines["decode of 1 at 1,024 tokens"]
    assert lines["prefill of 8,192 tokens"].endswith("outside of what was measured")


def test_the_json_of_show_holds_parameters_and_examples(
    bundled: dict[str, FittedCost], capsys: pytest.CaptureFixture[str]
) -> None:
    plain = json.loads(answer(capsys, "show", ONE, "--json"))
    assert plain["profile"] == ONE
    assert plain["step_time_error_p90_percent"] == 11.3
    assert plain["parameters"] == json.loads(Path(plain["path"]).read_text())["parameters"]
    assert [each["step_s"] for each in plain["examples"]] == [bundled[ONE].step_time_s(step.shape) for step in EXAMPLES]
    assert all(each["low_s"] < each["step_s"] < each["high_s"] for each in plain["examples"])


def test_a_profile_of_another_kind_is_shown_too(
    bundled: dict[str, FittedCost], capsys: pytest.CaptureFixture[str]
) -> None:
    save_profile(ConstantCost(step_s=0.01), "flat.json")
    shown = answer(capsys, "show", "flat.json")
    assert "kind      constant\n" in shown
    assert "evidence  uncalibrated\n" in shown
    assert shown.count("10.00 ms") == len(EXAMPLES)
    assert json.loads(answer(capsys, "show", "flat.json", "--json"))["step_time_error_p50_percent"] is None


# -- diff


def test_diff_sets_parameters_and_step_times_side_by_side(
    bundled: dict[str, FittedCost], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = answer(capsys, "diff", ONE, TWO)
    flat = " ".join(shown.split())
    assert f"A: {ONE} B: {TWO}" in flat
    assert "tensor_parallel_size 1 2" in flat
    assert flat.index("step times") < flat.index("most at:") < flat.index("tensor_parallel_size")
    assert "base_s" not in flat
    inner = " ".join(answer(capsys, "diff", ONE, TWO, "--parameters").split())
    assert inner.index("most at:") < inner.index("base_s 0.005 0.003")
    assert "pair_s" not in inner, "it is the same in both"
    plain = json.loads(answer(capsys, "diff", ONE, TWO, "--json"))
    assert plain["provenance"] == {"tensor_parallel_size": [1, 2]}
    assert plain["parameters"] == {"base_s": [5e-3, 3e-3]}
    for step, row in zip(GRID, plain["steps"], strict=True):
        times_s = [cost.step_time_s(step.shape) for cost in (bundled[ONE], bundled[TWO])]
        assert row["step_s"] == times_s
        assert row["difference_percent"] == pytest.approx(100 * (times_s[1] / times_s[0] - 1))
    largest = max(plain["steps"], key=lambda row: abs(row["difference_percent"]))
    first = shown.splitlines().index(next(line for line in shown.splitlines() if "most at:" in line)) + 1
    assert shown.splitlines()[first] == f"  {largest['step']}: {largest['difference_percent']:+.1f} %"


def test_a_profile_does_not_differ_from_itself(
    bundled: dict[str, FittedCost], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = answer(capsys, "diff", ONE, ONE)
    assert "They predict the same step times." in shown
    assert "parameters that differ" not in shown


def test_profiles_of_different_kinds_can_be_compared(
    bundled: dict[str, FittedCost], capsys: pytest.CaptureFixture[str]
) -> None:
    save_profile(ConstantCost(step_s=0.01), "flat.json")
    assert "They differ by" in answer(capsys, "diff", ONE, "flat.json")


# -- what goes wrong


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("show", "llama-h100-tp"), 2, "no bundled profile 'llama-h100-tp'; nearest: llama-h100-tp"),
        (("show", "gone.json"), 3, "error: cannot read profile gone.json: No such file or directory"),
        (("show", "./gone"), 3, "cannot read profile ./gone: No such file"),
        (("show", "broken.json"), 3, "broken.json, line 1: not valid JSON"),
        (("show", "bytes.json"), 3, "cannot read profile bytes.json: not UTF-8 text"),
        (("show", "edited.json"), 3, "does not fit the content, which was changed or damaged"),
        (("diff", ONE), 2, "Missing argument 'B'"),
        (("diff", ONE, "gone.json"), 3, "cannot read profile gone.json"),
        (("list", "--dir", "gone"), 2, "gone is no folder"),
        (("list", "--tp", "0"), 2, "--tp"),
        (("lst",), 2, "No such command 'lst'"),
    ],
)
def test_bad_input_ends_with_its_code_and_a_message(
    bundled: dict[str, FittedCost],
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    Path("broken.json").write_text("{")
    Path("bytes.json").write_bytes(b"\xff\xfe{")
    save_profile(fitted(), "edited.json")
    Path("edited.json").write_text(Path("edited.json").read_text().replace('"base_s": 0.005', '"base_s": 0.004'))
    found, error = refused(capsys, *arguments)
    assert (found, message in error) == (code, True), error


def test_every_bundled_profile_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    rows = listed(capsys)
    assert rows
    for row in rows[:3]:
        assert json.loads(answer(capsys, "show", row["name"], "--json"))["checksum"] == row["checksum"]
