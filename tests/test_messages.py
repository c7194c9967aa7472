"""What commands say of settings that are wrong, and which files they let alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from windtunnel.cli.main import main
from windtunnel.rundir import OutputError, check_can_write_scenario

SWEEP = ("sweep", "chat-8b-h100", "--vary", "max_num_seqs=1,2")
CAPACITY = ("capacity", "chat-8b-h100", "--slo", "ttft:p99<1s")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("compare", "chat-8b-h100", "--variant", "x; max_num_seqs=3; max-num-seqs=4"), "x: max_num_seqs is set twice"),
        (("compare", "chat-8b-h100", "--over", "tp=1,2", "--set", "seed=3", "--set", "seed=4"), "seed is set twice"),
        ((*CAPACITY, "--set", "request_rate=nan"), "error: --set request_rate: request_rate = nan in [workload] must"),
        (("capacity", "chat-8b-h100", "--slo", "goodput>=99%", "--goodput", "ttft"), "error: --goodput: cannot read"),
        ((*CAPACITY, "--set", "nosuch=1"), "unknown setting 'nosuch' (windtunnel schema --markdown lists all)"),
        (("sweep", "chat-8b-h100", "--vary", "nosuch=1,2"), "'nosuch' (windtunnel schema --markdown lists all)"),
        (("sweep", "chat-8b-h100", "--vary", "max_num_seq=1,2"), "did you mean 'max_num_seqs'?"),
        ((*SWEEP, "--metric", "nosuch"), "(windtunnel simulate --json prints all)"),
        ((*SWEEP, "--metric", "p99_ttf_ms"), "did you mean 'p99_ttft_ms'?"),
        ((*SWEEP, "--reps", "0"), "'--reps': Input should be greater than or equal to 1, got 0: give 1 or more"),
        ((*CAPACITY, "--num-requests", "0"), "greater than or equal to 100, got 0: give 100 or more"),
    ],
)
def test_a_wrong_setting_is_told_with_its_flag_value_and_remedy(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_scenario_takes_the_place_of_another_one_only(tmp_path: Path) -> None:
    notes, earlier, new = tmp_path / "notes.toml", tmp_path / "earlier.toml", tmp_path / "new.toml"
    notes.write_text('[tool]\nname = "mine"\n')
    earlier.write_text('schema_version = 1\nname = "earlier"\n')
    with pytest.raises(OutputError, match=r"no scenario .* write over it with --force"):
        check_can_write_scenario(notes)
    for path, force in ((notes, True), (earlier, False), (new, False)):
        check_can_write_scenario(path, force=force)


@pytest.mark.parametrize("command", ["optimize", "plan"])
def test_commands_refuse_to_save_a_scenario_over_something_else(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    poem = tmp_path / "poem.txt"
    poem.write_text("roses are red\n")
    assert main([command, "chat-8b-h100", "--save-scenario", str(poem)]) == 2
    assert "a file is there that is no scenario" in capsys.readouterr().err
    assert poem.read_text() == "roses are red\n"
